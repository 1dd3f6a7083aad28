"""``fxquant.compile``: conversion, per-layer compile, and the guards that it leaves out."""

from __future__ import annotations

import copy
import gc
import logging
import weakref

import pytest
import torch
from torch import nn

import fxquant
from fxquant import ConfigError, QuantizedTensor, UnsupportedError
from fxquant.compiler import repeated_layers, signature
from fxquant.kernels.formats import FORMATS, Scheme


def mlp(width: int = 32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


def test_converts_and_compiles(relative_error):
    model, x = mlp(), torch.randn(3, 32)
    twin = copy.deepcopy(model)
    fxquant.quantize_(twin, "fp8_per_channel")
    compiled = fxquant.compile(model, "fp8_per_channel", fullgraph=True)
    assert isinstance(model[0].weight, QuantizedTensor)
    assert relative_error(compiled(x), twin(x)) < 0.02


def test_refusals_come_before_conversion():
    model = mlp()
    with pytest.raises(ConfigError, match="backend"):
        fxquant.compile(model, "fp8_per_channel", backend="inductor")
    with pytest.raises(ConfigError, match="unknown option"):
        fxquant.compile(model, "fp8_per_channel", options={"cudagraphs": True})
    with pytest.raises(ConfigError, match="unknown mode"):
        fxquant.compile(model, "fp8_per_channel", mode="fastest")
    with pytest.raises(ConfigError, match="argument of its own"):
        fxquant.compile(model, options={"quantization": "fp8_per_channel"})
    with pytest.raises(ConfigError, match=r"got str 'llama', needed is a torch\.nn\.Module"):
        fxquant.compile("llama", "fp8_per_channel")
    with pytest.raises(ConfigError, match="no module list"):
        fxquant.compile(model, "fp8_per_channel", per_layer=True)
    assert not isinstance(model[0].weight, QuantizedTensor)
    with pytest.raises(ConfigError, match="holds no quantised weight"):
        fxquant.compile(model)


def test_repeated_layers_are_the_outermost(llama):
    model = llama(num_hidden_layers=3)
    assert repeated_layers(model) == list(model.model.layers)
    assert repeated_layers(nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])) == []
    nested = nn.ModuleDict({"blocks": nn.ModuleList(nn.ModuleList([nn.ReLU(), nn.ReLU()]) for _ in range(2))})
    assert repeated_layers(nested) == list(nested["blocks"])


def test_signatures_tell_weights_apart_and_equal_ones_not():
    models = [mlp(), mlp(), mlp(16)]
    for model in models:
        fxquant.quantize_(model, "fp8_per_channel")
    other = mlp()
    fxquant.quantize_(other, "fp8_per_tensor")
    assert signature(models[0]) == signature(models[1])
    assert len({signature(model) for model in [*models, other]}) == 3


def test_equal_models_share_a_compiled_graph():
    from torch._dynamo.utils import counters

    x = torch.randn(3, 32)
    counters.clear()
    for _ in range(3):
        fxquant.compile(mlp(), "fp8_per_channel")(x)
    assert counters["stats"]["unique_graphs"] == 1


def test_a_weight_in_another_format_runs_uncompiled_with_one_warning(caplog, relative_error):
    model, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32, bias=False)), torch.randn(3, 32)
    compiled = fxquant.compile(model, "fp8_per_channel")
    compiled(x)
    scheme = Scheme(weight=FORMATS["fp8_per_tensor_static"], activation=FORMATS["fp8_per_token"])
    weight = QuantizedTensor.from_float(torch.randn(32, 64), scheme)
    model[2].weight = nn.Parameter(weight, requires_grad=False)
    with caplog.at_level(logging.WARNING, logger="fxquant"):
        assert relative_error(compiled(x), model(x)) < 0.02
    model[2].weight = nn.Parameter(torch.randn(32, 64), requires_grad=False)
    assert relative_error(compiled(x), model(x)) < 0.02
    weight = QuantizedTensor.from_float(torch.randn(16, 64), scheme)
    model[2].weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(UnsupportedError, match=r"2: the compiled graph is for a weight of shape \(32, 64\)"):
        compiled(x)
    torch.compiler.reset()
    assert fxquant.compile(model)(x).shape == (3, 16)


@pytest.mark.parametrize("per_layer", [False, True])
def test_generate_gives_the_tokens_of_the_eager_model(per_layer, llama):
    model = llama()
    ids = torch.arange(6).reshape(1, 6)
    arguments = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    fxquant.quantize_(model, "fp8_per_channel")
    expected = model.generate(ids, **arguments)
    if per_layer:
        fxquant.compile(model, per_layer=True, dynamic=True)
    else:
        model.forward = torch.compile(model.forward, backend="fxquant", dynamic=True)
    assert torch.equal(model.generate(ids, **arguments), expected)


def test_global_configuration_is_left_alone():
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    before = inductor.get_config_copy(), dynamo.get_config_copy()
    fxquant.compile(mlp(), "fp8_per_channel", options={"inductor": {"max_autotune": False}})(torch.randn(2, 32))
    assert (inductor.get_config_copy(), dynamo.get_config_copy()) == before


@pytest.mark.parametrize("change", ["replaced", "assigned"])
def test_layers_that_shared_a_weight_and_do_no_longer(change, relative_error):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    x, other = torch.randn(3, 32), nn.Linear(32, 32, bias=False)
    model = fxquant.compile(Tied(), "fp8_per_channel")
    model(x)
    fxquant.quantize_(other, "fp8_per_channel")
    if change == "replaced":
        model.b.weight = other.weight
    else:
        state = {"a.weight": model.a.weight.clone(), "b.weight": other.weight}
        model.load_state_dict(state, assign=True)
    with torch.no_grad():
        expected = other(torch.tanh(model.a(x)))
        assert relative_error(model(x), expected) < 0.02


@pytest.mark.parametrize("road", ["fxquant.compile", "plain"])
def test_a_compiled_graph_keeps_neither_inputs_nor_parameters_alive(road):
    model = nn.Sequential(nn.Linear(32, 32))
    x = torch.randn(3, 32)
    with torch.no_grad():
        if road == "plain":
            compiled = torch.compile(model, backend="fxquant", options={"quantization": "fp8_per_channel"})
        else:
            compiled = fxquant.compile(model, "fp8_per_channel")
        compiled(x)
        alive = [weakref.ref(x), weakref.ref(model[0].bias)]
        model[0].bias = nn.Parameter(torch.zeros(32), requires_grad=False)
        del x
        compiled(torch.randn(3, 32))
    gc.collect()
    assert [reference() for reference in alive] == [None, None]
