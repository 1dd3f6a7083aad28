"""Both roads through torch.compile(backend="fxquant"): right weights at every call, real conversion, clear refusals."""

from __future__ import annotations

import copy
import io
import logging
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxquant
from fxquant import ConfigError, QuantizedTensor, RuleError, UnsupportedError
from fxquant.backend import fxquant_backend
from fxquant.kernels.formats import FORMATS, Scheme

SCHEMES = ["fp8_per_tensor", "fp8_per_channel", "fp8_per_block"]
IDS = torch.arange(24).reshape(2, 12)


class MLP(nn.Module):
    def __init__(self, width: int = 64, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, 2 * width, dtype=dtype)
        self.up_proj = nn.Linear(width, 2 * width, dtype=dtype)
        self.down_proj = nn.Linear(2 * width, width, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class CountingBackend:
    """The fxquant backend, counting its calls."""

    def __init__(self, **options: object) -> None:
        self.calls = 0
        self.options = options

    def __call__(self, gm, inputs, **kwargs):
        self.calls += 1
        return fxquant_backend(gm, inputs, options=self.options)


def compiled(model: nn.Module, **options: object) -> nn.Module:
    return torch.compile(model, backend="fxquant", options=options)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_llama_compiled_equals_eager_on_every_road(scheme, llama, relative_error):
    reference, model, bare = llama(), llama(), llama()
    fxquant.quantize_(model, scheme)
    with torch.no_grad():
        plain, eager = reference(IDS).logits, model(IDS).logits
        assert relative_error(eager, plain) > 0.01  # the conversion is real
        assert relative_error(compiled(model)(IDS).logits, eager) < 0.02
        assert relative_error(compiled(bare, quantization=scheme)(IDS).logits, eager) < 0.02
        assert relative_error(fxquant.compile(model)(IDS).logits, eager) < 0.02
        assert relative_error(fxquant.compile(model, per_layer=True)(IDS).logits, eager) < 0.02


def test_per_layer_compile_is_one_backend_call(llama):
    model = llama(num_hidden_layers=6)
    fxquant.quantize_(model, "fp8_per_channel")
    hidden, rotary = torch.randn(2, 8, 64, dtype=torch.bfloat16), (torch.ones(1, 8, 16).bfloat16(),) * 2
    backend = CountingBackend()
    expected, got = hidden, hidden
    with torch.no_grad():
        for layer in model.model.layers:
            expected = layer(expected, position_embeddings=rotary)
        for layer in model.model.layers:
            layer.compile(backend=backend)
            got = layer(got, position_embeddings=rotary)
    assert backend.calls == 1
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)


def test_plain_layers_share_a_graph_and_keep_their_own_weights(relative_error):
    layers = [MLP() for _ in range(3)]
    backend = CountingBackend(quantization="fp8_per_channel")
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in layers:
            got = torch.compile(layer, backend=backend)(x)
            twin = copy.deepcopy(layer)
            fxquant.quantize_(twin, "fp8_per_channel")
            assert relative_error(got, twin(x)) < 0.02
            assert relative_error(got, layers[0](x)) > 0.5 or layer is layers[0]
    assert backend.calls == 1


@pytest.mark.parametrize("road", ["converted", "plain"])
def test_two_models_of_one_class(road, relative_error):
    first, second = MLP(), MLP()
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        for model in (first, second):
            twin = copy.deepcopy(model)
            fxquant.quantize_(twin, "fp8_per_channel")
            if road == "converted":
                got = fxquant.compile(copy.deepcopy(model), "fp8_per_channel")(x)
            else:
                got = compiled(model, quantization="fp8_per_channel")(x)
            assert relative_error(got, twin(x)) < 0.02


def test_models_of_one_class_with_other_schemes_and_shapes_are_kept_apart(relative_error):
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    for scheme in SCHEMES:
        model = MLP()
        twin = copy.deepcopy(model)
        fxquant.quantize_(twin, scheme)
        assert relative_error(fxquant.compile(model, scheme)(x), twin(x)) < 0.02
    wider = MLP()
    wider.gate_proj, wider.up_proj = nn.Linear(64, 192).bfloat16(), nn.Linear(64, 192).bfloat16()
    wider.down_proj = nn.Linear(192, 64).bfloat16()
    twin = copy.deepcopy(wider)
    fxquant.quantize_(twin, "fp8_per_channel")
    assert relative_error(fxquant.compile(wider, "fp8_per_channel")(x), twin(x)) < 0.02


@pytest.mark.parametrize("change", ["load_state_dict", "in_place", "replaced", "replaced_quantized", "data"])
@pytest.mark.parametrize("road", ["fxquant.compile", "converted", "plain"])
def test_changed_weights_are_seen_after_compile(road, change, relative_error):
    model, other, x = MLP(), MLP(), torch.randn(4, 64, dtype=torch.bfloat16)
    if road == "fxquant.compile":
        call = fxquant.compile(model, "fp8_per_channel")
    elif road == "converted":
        fxquant.quantize_(model, "fp8_per_channel")
        call = compiled(model)
    else:
        call = compiled(model, quantization="fp8_per_channel")
    with torch.no_grad():
        before = call(x)
        if change == "load_state_dict":
            model.load_state_dict(other.state_dict())
        elif change == "in_place":
            model.down_proj.weight.mul_(-2)
        elif change == "data":
            model.down_proj.weight.data = other.down_proj.weight.data.clone()
        else:
            weight = other.down_proj.weight
            if change == "replaced_quantized":
                scheme = Scheme(weight=FORMATS["fp8_per_tensor_static"], activation=FORMATS["fp8_per_token"])
                weight = QuantizedTensor.from_float(weight, scheme)
            model.down_proj.weight = nn.Parameter(weight, requires_grad=False)
        after = call(x)
        twin = copy.deepcopy(model)
        if road == "plain" and change != "replaced_quantized":
            fxquant.quantize_(twin, "fp8_per_channel")
        elif road == "plain":
            fxquant.quantize_(twin, "online", {"linear": "fp8_per_channel", "ignore": ["down_proj"]})
        assert relative_error(after, twin(x)) < 0.02
        assert relative_error(after, before) > 0.3


def test_refresh_sees_what_pytorch_does_not_count(relative_error):
    model, x = MLP(), torch.randn(4, 64, dtype=torch.bfloat16)
    call = compiled(model, quantization="fp8_per_channel")
    with torch.no_grad():
        before = call(x)
        model.down_proj.weight.data.mul_(3)
        assert relative_error(call(x), before) < 0.01
        assert fxquant.refresh(model) == 3
        assert relative_error(call(x), before) > 0.5


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("move", ["half", "float", "cpu", "deepcopy", "save"])
def test_moving_a_model_around_a_compile(move, when, relative_error):
    model, x = MLP(), torch.randn(4, 64, dtype=torch.bfloat16)
    fxquant.quantize_(model, "fp8_per_channel")
    expected = model(x)
    if when == "after":
        compiled(model)(x)
        fxquant.compile(model)(x)
    if move == "half":
        model.half()
    elif move == "float":
        model.float()
    elif move == "cpu":
        model.to("cpu")
    elif move == "deepcopy":
        model = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        model.load_state_dict(torch.load(file, weights_only=True))
    assert all(isinstance(getattr(model, name).weight, QuantizedTensor) for name in ("gate_proj", "up_proj", "down_proj"))
    dtype = model.down_proj.bias.dtype
    assert model.down_proj.weight.dtype == dtype
    for call in (model, compiled(model), fxquant.compile(model)):
        assert relative_error(call(x.to(dtype)), expected) < 0.02


def test_dynamic_batches_make_at_most_two_graphs():
    for road in ("converted", "plain"):
        torch.compiler.reset()
        model = MLP()
        backend = CountingBackend(**({"quantization": "fp8_per_channel"} if road == "plain" else {}))
        if road == "converted":
            fxquant.quantize_(model, "fp8_per_channel")
        call = torch.compile(model, backend=backend, dynamic=True)
        with torch.no_grad():
            for batch in (2, 3, 5, 8, 13, 16, 17, 33, 64, 65, 100, 128):
                assert call(torch.randn(batch, 64, dtype=torch.bfloat16)).shape == (batch, 64)
        assert backend.calls <= 2


def test_grad_mode_works_as_inference(relative_error):
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    for frozen in (True, False):
        model = MLP().requires_grad_(not frozen)
        twin = copy.deepcopy(model)
        fxquant.quantize_(twin, "fp8_per_channel")
        out = compiled(model, quantization="fp8_per_channel")(x)
        assert not out.requires_grad
        assert relative_error(out, twin(x)) < 0.02


def test_a_leaf_that_requires_grad_is_refused_and_a_non_leaf_detached_with_one_warning(caplog):
    model = MLP()
    fxquant.quantize_(model, "fp8_per_channel")
    call = compiled(model)
    leaf = torch.randn(4, 64, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(UnsupportedError, match="inference only"):
        call(leaf)
    with caplog.at_level(logging.WARNING, logger="fxquant"):
        for _ in range(3):
            assert not call(leaf * 2).requires_grad
    assert sum("detached" in record.message for record in caplog.records) <= 1


def test_embedding_in_front_of_a_compiled_layer():
    embedding, model = nn.Embedding(10, 64).bfloat16(), MLP()
    fxquant.quantize_(model, "fp8_per_channel")
    model.compile(backend="fxquant")
    assert model(embedding(torch.arange(5))).shape == (5, 64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantisation": "fp8_per_tensor"}, "quantization"),
        ({"quantization": "fp9"}, "fp8_per_tensor"),
        ({"max_autotune": True}, "options\\['inductor'\\]"),
        ({"quantization": "fp8_per_tensor", "mode": "fast"}, "reduce-overhead"),
        ({"quantization": "fp8_per_tensor", "inductor": {"no_such": 1}}, "no_such"),
        ({"quantization": "fp8_per_tensor", "inductor": {"freezing": True}}, "freezing"),
        ({"quantization": "fp8_per_tensor", "linear_backend": "cutlass"}, "reference"),
    ],
)
def test_bad_options_are_refused_with_what_is_accepted(options, message):
    with pytest.raises(ConfigError, match=message):
        compiled(MLP(), **options)(torch.randn(2, 64, dtype=torch.bfloat16))


def test_bad_rules_are_refused_and_say_that_names_are_relative():
    with pytest.raises(RuleError, match=r"relative to the module given to torch\.compile"):
        compiled(MLP(), quantization="fp8_per_tensor", quantization_config={"ignore": ["model.down_proj"]})(
            torch.randn(2, 64, dtype=torch.bfloat16)
        )


def test_rules_decide_by_name_on_the_plain_road(relative_error):
    model, x = MLP(), torch.randn(2, 64, dtype=torch.bfloat16)
    twin = copy.deepcopy(model)
    config = {"linear": "fp8_per_tensor", "ignore": ["down_proj"]}
    fxquant.quantize_(twin, "online", config)
    assert not isinstance(twin.down_proj.weight, QuantizedTensor)
    with torch.no_grad():
        got = compiled(model, quantization_config=config)(x)
        assert relative_error(got, twin(x)) < 0.02


def test_head_router_and_tied_embedding_stay_on_the_plain_road(llama, caplog):
    model = llama(tie_word_embeddings=True)
    with caplog.at_level(logging.INFO, logger="fxquant"), torch.no_grad():
        compiled(model, quantization="fp8_per_tensor")(IDS)
    assert any("14 matches" in record.message for record in caplog.records)


@pytest.mark.parametrize("config", [{"ignore": ["lm_head"]}, {"ignore": ["model.embed_tokens", "*lm_head"]}])
def test_a_tied_head_can_be_named_on_the_plain_road(config, llama, relative_error):
    model = llama(tie_word_embeddings=True)
    twin = copy.deepcopy(model)
    fxquant.quantize_(twin, "fp8_per_channel", config)
    with torch.no_grad():
        got = compiled(model, quantization="fp8_per_channel", quantization_config=config)(IDS).logits
        assert relative_error(got, twin(IDS).logits) < 0.02


def test_a_tied_head_is_quantised_by_its_exact_name_and_the_embedding_is_not(llama, relative_error):
    model = llama(tie_word_embeddings=True)
    twin = copy.deepcopy(model)
    config = {"targets": {"lm_head": "fp8_per_channel"}}
    fxquant.quantize_(twin, None, config)
    with torch.no_grad():
        got = compiled(model, quantization_config=config)(IDS).logits
        assert relative_error(got, twin(IDS).logits) < 1e-3
        assert relative_error(got, model(IDS).logits) > 0.01


def test_layers_that_share_a_weight_are_named_each_by_its_own_name(relative_error):
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32)})
    model["b"].weight = model["a"].weight
    model.forward = lambda x: model["b"](torch.tanh(model["a"](x)))
    x = torch.randn(2, 32)
    with torch.no_grad():
        compiled(model, quantization="fp8_per_channel", quantization_config={"ignore": ["a", "b"]})(x)
        torch.compiler.reset()
        with pytest.raises(RuleError, match="a and b share one weight"):
            compiled(model, quantization="fp8_per_channel", quantization_config={"ignore": ["b"]})(x)


def test_originals_are_announced_once_with_bytes_and_the_call_that_frees_them(caplog):
    model, x = MLP(width=96), torch.randn(2, 96, dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING, logger="fxquant"), torch.no_grad():
        for batch in (x, torch.cat([x, x]), torch.cat([x, x, x])):
            compiled(model, quantization="fp8_per_tensor")(batch)
    said = [record.message for record in caplog.records if "original weights" in record.message]
    assert len(said) == 1
    assert f"{3 * 96 * 192 * 2 / 1e6:.2f} MB" in said[0]
    assert "quantize_" in said[0]


def test_nothing_quantised_is_said(caplog):
    with caplog.at_level(logging.WARNING, logger="fxquant"), torch.no_grad():
        compiled(MLP(width=48))(torch.randn(2, 48, dtype=torch.bfloat16))
    assert any("no quantization option" in record.message for record in caplog.records)


def test_a_fused_call_that_hides_its_weights_is_said(caplog):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 1).eval()
    with caplog.at_level(logging.WARNING, logger="fxquant"), torch.no_grad():
        compiled(model, quantization="fp8_per_channel")(torch.randn(2, 5, 64))
    assert any("no layer of this graph is quantised" in record.message for record in caplog.records)


def test_a_scheme_without_a_method_is_refused_as_by_quantize():
    with pytest.raises(UnsupportedError, match="nothing would be quantised"):
        compiled(MLP().double(), quantization="mxfp8")(torch.randn(2, 64, dtype=torch.float64))


def test_mode_alone_and_mode_inside_options():
    model, x = MLP(), torch.randn(2, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        inside = compiled(model, quantization="fp8_per_tensor", mode="reduce-overhead")(x)
        fxquant.quantize_(model, "fp8_per_tensor")
        alone = torch.compile(model, backend="fxquant", mode="max-autotune-no-cudagraphs")(x)
    torch.testing.assert_close(inside, alone, rtol=0.02, atol=0.02)


def test_writing_to_a_quantised_weight_inside_the_graph_is_refused():
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(64, 64, dtype=torch.bfloat16)

        def forward(self, x):
            self.proj.weight[0].mul_(2)
            return self.proj(x)

    model = Writes()
    fxquant.quantize_(model, "fp8_per_tensor")
    with torch.no_grad(), pytest.raises(UnsupportedError, match="writes to the quantised weight of proj"):
        compiled(model)(torch.randn(2, 64, dtype=torch.bfloat16))


def test_autocast_on_a_float32_model(relative_error):
    model, x = MLP(dtype=torch.float32), torch.randn(4, 64)
    fxquant.quantize_(model, "fp8_per_channel")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        eager = model(x)
        got = compiled(model)(x)
    assert got.dtype == eager.dtype == torch.bfloat16
    assert relative_error(got, eager) < 0.02


def test_inference_mode_inside_and_outside(relative_error):
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    model = MLP()
    with torch.inference_mode():
        fxquant.quantize_(model, "fp8_per_channel")
        inside = model(x)
        assert relative_error(compiled(model)(x), inside) < 0.02
    assert relative_error(compiled(model)(x), inside) < 0.02
    with torch.inference_mode():
        plain = MLP()
        compiled(plain, quantization="fp8_per_channel")(x)


def test_reads_of_a_weight_other_than_products_dequantise(relative_error):
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(64, 64, dtype=torch.bfloat16)

        def forward(self, x):
            w = self.proj.weight
            return self.proj(x) + w[:4].sum() + (w.float() * 0.5).sum().bfloat16() + F.linear(x, w.t()) + w.T.contiguous()[0]

    model, x = Odd(), torch.randn(2, 64, dtype=torch.bfloat16)
    fxquant.quantize_(model, "fp8_per_channel")
    with torch.no_grad():
        assert relative_error(compiled(model)(x), model(x)) < 0.02


def test_fullgraph_and_no_float_weight_in_the_generated_inputs(llama):
    model = llama()
    fxquant.quantize_(model, "fp8_per_channel")
    with torch.no_grad():
        torch.compile(model, backend="fxquant", fullgraph=True)(IDS)


def test_generated_code_fuses_the_quantisation_with_its_producer(llama, relative_error):
    """One activation quantisation for q/k/v and one for gate/up, inside the kernels of the norm and of silu * up."""
    from torch._inductor.utils import run_and_get_code

    model = llama(num_hidden_layers=1)
    fxquant.quantize_(model, "fp8_per_channel")
    with torch.no_grad():
        _, code = run_and_get_code(compiled(model), IDS)
    names = set(re.findall(r"(cpp_fused_\w+)", "\n".join(code)))
    quantising = [name for name in names if "amax" in name]
    assert any("rsqrt" in name or "pow" in name or "mean" in name for name in quantising), names
    assert any("silu" in name for name in quantising), names
    assert len(quantising) == 4, names  # q/k/v, o, gate/up, down


def test_a_change_of_the_kernels_code_invalidates_cached_graphs(monkeypatch, tmp_path):
    """AOTAutograd caches by the graph, in which our ops are only names."""
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    hits = []
    for digest in ("one", "one", "two"):
        monkeypatch.setattr("fxquant.backend._code_digest", lambda digest=digest: digest)
        torch.compiler.reset()
        counters.clear()
        torch.manual_seed(0)
        fxquant.compile(nn.Sequential(nn.Linear(32, 32)), "fp8_per_channel")(torch.randn(2, 32))
        hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert hits == [0, 1, 0]
