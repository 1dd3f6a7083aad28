"""The grammar of ``quantization`` and ``quantization_config``: parsed here, merged into a ``Policy``, and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from .errors import ConfigError, suggest
from .kernels.formats import ACTIVATION_FORMATS, FORMATS, SCALE_SEARCHES, WEIGHT_FORMATS, Format, defined_activations
from .patterns import Pattern
from .rules import Policy
from .schemes import (
    DEFAULT,
    NAMES,
    ONLINE,
    SHORTHANDS,
    SLOTS,
    WEIGHT_ONLY,
    DefaultActivation,
    SchemeRequest,
    Shorthand,
    Slot,
    request_named,
)

ACTIVATION_NAMES = (*ACTIVATION_FORMATS, WEIGHT_ONLY)
"""Names that ``activation`` takes, beside null for the device's default."""


class _Strict(BaseModel):
    """A frozen model that takes only its own keys and raises ConfigError, however it is made.

    Validators raise ValueError with one argument a problem, each written to follow the field's name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    title: ClassVar[str] = ""

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigError("\n".join(_problems(type(self), error))) from None

    @classmethod
    def model_validate(cls, obj: Any, **_: Any) -> Self:
        """The model from a mapping (or itself).

        Raises:
            ConfigError: anything else, or a mapping that breaks the grammar.
        """
        if isinstance(obj, cls):
            return obj
        if not isinstance(obj, Mapping):
            raise ConfigError(f"{cls.title}: got {_shown(obj)}; write a dict with any of {', '.join(cls.model_fields)}.")
        for key in obj:
            if not isinstance(key, str):
                raise ConfigError(f"{cls.title}: got the key {_shown(key)}; accepted: {', '.join(cls.model_fields)}.")
        return cls(**obj)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **_: Any) -> Self:
        """The model from JSON text; a key that is written twice is refused.

        Raises:
            ConfigError: text that is not JSON, or breaks the grammar.
        """
        try:
            data = json.loads(json_data, object_pairs_hook=_unique_keys)
        except json.JSONDecodeError as error:
            found = f"got {_shown(json_data)}, which is not JSON ({error})"
            raise ConfigError(f"{cls.title}: {found}; write a JSON object.") from None
        return cls.model_validate(data)

    @model_serializer(mode="wrap")
    def _dump_what_was_set(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what was left out: null means something else."""
        return {key: value for key, value in handler(self).items() if key in self.model_fields_set}


class SlotConfig(_Strict):
    """The scheme of one slot, part by part; a part left out falls back to the shorthand's.

    Args:
        weight: a weight format; null leaves the slot's layers as they are.
        activation: an activation format whose product with the weight is defined, ``"none"`` for weight-only, or null for the
            device's default.
    """

    title: ClassVar[str] = "slot"

    weight: str | None = None
    activation: str | None = None

    @field_validator("weight", mode="before")
    @classmethod
    def _check_weight(cls, value: object) -> object:
        if value is not None and value not in WEIGHT_FORMATS:
            raise ValueError(f": got {_shown(value)}; {_instead_of_weight(value)}")
        return value

    @field_validator("activation", mode="before")
    @classmethod
    def _check_activation(cls, value: object) -> object:
        if value is None or value in ACTIVATION_NAMES:
            return value
        kind = ", which is a weight format" if value in WEIGHT_FORMATS else ""
        hint = suggest(value, ACTIVATION_NAMES) if isinstance(value, str) and not kind else ""
        raise ValueError(
            f": got {_shown(value)}{kind}; accepted: {', '.join(ACTIVATION_FORMATS)}, '{WEIGHT_ONLY}' (weight-only), "
            f"or null (the device's default).{hint}"
        )

    @model_validator(mode="after")
    def _check_pair(self) -> Self:
        if "weight" in self.model_fields_set and self.weight is None and self.activation in ACTIVATION_FORMATS:
            raise ValueError(
                f".activation: got '{self.activation}' beside a null weight, which leaves the layers as they are; "
                "give a weight format, or leave the activation out."
            )
        if self.weight is not None and (problem := _undefined_pair(self.weight, self.activation)):
            raise ValueError(f".activation{problem}")
        return self


class QuantizationConfig(_Strict):
    r"""What to quantise, and how, where a shorthand alone does not say it.

    Args:
        linear: scheme of linear layers: a shorthand, a weight format, or ``{weight, activation}``.
        moe: the same for expert layers.
        ignore: patterns of the layers to leave as they are: names, globs, or ``re:`` and a regular expression.
        targets: pattern -> shorthand; instead of ``linear`` and ``moe``, and only these layers are quantised.
        scale_search: how the block scales of 4-bit weights are found: ``amax``, or ``mse``: of a few candidates for each block,
            the one with the least squared error. It needs no data. Other formats ignore it.

    Raises:
        ConfigError: naming the field, what was found and what is accepted.

    Example:
        >>> QuantizationConfig(linear="fp8_per_block", moe={"weight": "mxfp4", "activation": "none"}, ignore=[r"re:.*\.0\."])
    """

    title: ClassVar[str] = "quantization_config"

    linear: str | SlotConfig | None = None
    moe: str | SlotConfig | None = None
    ignore: tuple[str, ...] = ()
    targets: dict[str, str] | None = None
    scale_search: str = "amax"

    @field_validator("linear", "moe", mode="before")
    @classmethod
    def _check_slot(cls, value: object, info: ValidationInfo) -> object:
        if value is None or isinstance(value, SlotConfig):
            return value
        if isinstance(value, Mapping):
            return SlotConfig.model_validate(value)
        if not isinstance(value, str):
            accepted = "write a shorthand, a weight format, or {'weight': ..., 'activation': ...}."
            raise ValueError(f": got {_shown(value)}; {accepted}")
        _bare_slot(next(slot for slot in SLOTS if slot == info.field_name), value)
        return value

    @field_validator("ignore", mode="before")
    @classmethod
    def _check_ignore(cls, value: object) -> object:
        if value is None:
            return ()
        if isinstance(value, str):
            raise ValueError(f": got the string '{value}'; write a list: ['{value}'].")
        if not isinstance(value, list | tuple):
            raise ValueError(f": got {_shown(value)}; write a list of patterns.")
        _raise_all(problem for index, entry in enumerate(value) for problem in _pattern_problems(f"[{index}]", entry))
        return tuple(value)

    @field_validator("targets", mode="before")
    @classmethod
    def _check_targets(cls, value: object) -> object:
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ValueError(f": got {_shown(value)}; write a dict of pattern -> shorthand.")
        _raise_all(problem for entry in value.items() for problem in _target_problems(*entry))
        return dict(value)

    @field_validator("scale_search", mode="before")
    @classmethod
    def _check_scale_search(cls, value: object) -> object:
        if value is None:
            return "amax"
        if value not in SCALE_SEARCHES:
            hint = suggest(value, SCALE_SEARCHES) if isinstance(value, str) else ""
            raise ValueError(f": got {_shown(value)}; accepted: {', '.join(SCALE_SEARCHES)}.{hint}")
        return value

    @model_validator(mode="after")
    def _check_targets_stand_alone(self) -> Self:
        beside = [slot for slot in SLOTS if getattr(self, slot) is not None]
        if self.targets and beside:
            raise ValueError(
                f".targets: got targets beside {' and '.join(beside)}; targets alone choose the schemes of all layers: "
                "leave one of the two out."
            )
        return self


def parse_config(quantization_config: QuantizationConfig | Mapping[str, Any] | str | None) -> QuantizationConfig:
    """The config from a dict, JSON text or a QuantizationConfig (checked again: a copy may have been edited); None is empty.

    Raises:
        ConfigError: it breaks the grammar.
    """
    if quantization_config is None:
        return QuantizationConfig()
    if isinstance(quantization_config, str):
        if quantization_config in SHORTHANDS or quantization_config in WEIGHT_FORMATS:
            raise ConfigError(
                f"quantization_config: got '{quantization_config}'; a name alone goes into quantization, or into a slot: "
                f"{{'linear': '{quantization_config}'}}."
            )
        return QuantizationConfig.model_validate_json(quantization_config)
    if isinstance(quantization_config, QuantizationConfig):
        quantization_config = quantization_config.model_dump(warnings=False)
    return QuantizationConfig.model_validate(quantization_config)


def resolve(
    quantization: str | None = None, quantization_config: QuantizationConfig | Mapping[str, Any] | str | None = None
) -> Policy:
    """The policy that the two arguments ask for together.

    What ``quantization_config`` sets wins; a slot or a part of a slot that it leaves out is the shorthand's.

    Args:
        quantization: a shorthand, or ``online`` (also None beside a config): everything is in the config.
        quantization_config: a dict, a QuantizationConfig, or JSON text.

    Raises:
        ConfigError: either breaks the grammar, they exclude each other, or nothing would be quantised.
    """
    if quantization is None and quantization_config is None:
        raise ConfigError(f"quantization: nothing is asked for; give one of {', '.join(SHORTHANDS)}, or a config.")
    shorthand = _shorthand(quantization)
    config = parse_config(quantization_config)
    ignore = tuple(map(Pattern, config.ignore))
    if config.targets:
        if shorthand:
            raise ConfigError(
                f"quantization_config.targets: got targets beside quantization='{shorthand.name}'; targets alone choose the "
                f"schemes of all layers: write quantization='{ONLINE}', or leave the targets out."
            )
        targets = tuple((Pattern(text), name) for text, name in config.targets.items())
        return Policy(targets=targets, ignore=ignore, scale_search=config.scale_search)
    if shorthand is None and config.linear is None and config.moe is None:
        raise ConfigError(
            "quantization_config: sets none of linear, moe and targets, so nothing would be quantised; set one of them, "
            f"or give quantization one of {', '.join(SHORTHANDS)}."
        )
    linear, linear_origin = _merge("linear", config.linear, shorthand)
    moe, moe_origin = _merge("moe", config.moe, shorthand)
    return Policy(
        linear=linear,
        moe=moe,
        linear_origin=linear_origin,
        moe_origin=moe_origin,
        ignore=ignore,
        scale_search=config.scale_search,
    )


def _merge(slot: Slot, value: str | SlotConfig | None, shorthand: Shorthand | None) -> tuple[SchemeRequest | None, str]:
    """The slot's request, and where it comes from."""
    base = shorthand.request(slot) if shorthand else None
    base_origin = f"from quantization: {shorthand.name}" if shorthand else "no rule"
    if value is None:
        return base, base_origin if base or not shorthand else f"{shorthand.name} defines no {slot} method"
    if isinstance(value, str):
        return _bare_slot(slot, value), f"from {slot}: {value}"
    given = value.model_fields_set
    asked = f"activation {value.activation or 'default'}" if "activation" in given else ""
    activation = _activation(value.activation) if asked else base.activation if base else DEFAULT
    if "weight" in given:
        if value.weight is None:
            return None, f"{slot}.weight is null"
        request = SchemeRequest(weight=FORMATS[value.weight], activation=activation)
        return request, ", ".join(filter(None, (f"from {slot}: {value.weight}", asked)))
    if base is None:
        lacking = f"quantization='{shorthand.name}' defines no {slot} method" if shorthand else "no shorthand stands behind it"
        accepted = ", ".join(WEIGHT_FORMATS)
        raise ConfigError(f"quantization_config.{slot}: gives no weight, and {lacking}; set it to one of {accepted}.")
    if shorthand and (problem := _undefined_pair(base.weight.name, value.activation)):
        raise ConfigError(f"quantization_config.{slot}.activation{problem} The weight is that of '{shorthand.name}'.")
    return SchemeRequest(weight=base.weight, activation=activation), f"{base_origin}{asked and f', {slot}.{asked}'}"


def _shorthand(quantization: object) -> Shorthand | None:
    if quantization is None or quantization == ONLINE:
        return None
    if isinstance(quantization, str) and quantization in SHORTHANDS:
        return SHORTHANDS[quantization]
    accepted = (*SHORTHANDS, ONLINE)
    if quantization in WEIGHT_FORMATS:
        hint = f" For a weight format write quantization='{ONLINE}', quantization_config={{'linear': '{quantization}'}}."
    else:
        hint = suggest(quantization, accepted) if isinstance(quantization, str) else ""
    raise ConfigError(f"quantization: got {_shown(quantization)}; accepted: {', '.join(accepted)}.{hint}")


def _bare_slot(slot: Slot, name: str) -> SchemeRequest:
    """The request that a bare string stands for: a shorthand first, else a weight format with the default activation."""
    if name in NAMES:
        if request := request_named(name, slot):
            return request
        raise ValueError(f": got '{name}', which {SHORTHANDS[name].lack(slot)}.")
    shorthands = [other for other in SHORTHANDS if SHORTHANDS[other].request(slot)]
    kind = ", which is an activation format" if name in ACTIVATION_FORMATS else ""
    hint = "" if kind else suggest(name, (*shorthands, *WEIGHT_FORMATS))
    raise ValueError(
        f": got '{name}'{kind}; accepted: a shorthand ({', '.join(shorthands)}) or a weight format "
        f"({', '.join(WEIGHT_FORMATS)}).{hint}"
    )


def _activation(name: str | None) -> Format | DefaultActivation | None:
    if name is None:
        return DEFAULT
    return None if name == WEIGHT_ONLY else FORMATS[name]


def _undefined_pair(weight: str, activation: str | None) -> str:
    """What is wrong with multiplying the two, in words that follow the name of the activation's field; empty if nothing."""
    defined = defined_activations(FORMATS[weight])
    if activation in (None, WEIGHT_ONLY, *defined):
        return ""
    return (
        f": got '{activation}' beside the weight '{weight}', but floats are multiplied with floats and integers with integers; "
        f"accepted beside {weight}: {', '.join(defined)}, '{WEIGHT_ONLY}' (weight-only), or null (the device's default)."
    )


def _instead_of_weight(value: object) -> str:
    accepted = f"accepted: {', '.join(WEIGHT_FORMATS)}, or null (left as they are)."
    if isinstance(value, str) and value in SHORTHANDS:
        request = SHORTHANDS[value].moe or SHORTHANDS[value].linear
        named = f" write '{request.weight.name}' here, or" if request else ""
        return f"that is a shorthand:{named} '{value}' as the whole slot. Weight formats {accepted}"
    return accepted + (suggest(value, WEIGHT_FORMATS) if isinstance(value, str) else "")


def _target_problems(pattern: object, value: object) -> Iterator[str]:
    at = f"[{pattern!r}]" if not isinstance(pattern, str) else f"['{pattern}']"
    yield from _pattern_problems(at, pattern)
    if not (isinstance(value, str) and value in SHORTHANDS):
        alike = [name for name, short in SHORTHANDS.items() if short.moe is not None and short.moe.weight.name == value]
        if alike:
            only = "" if SHORTHANDS[alike[0]].linear else f" (experts only; linear layers get it by {{'linear': '{value}'}})"
            hint = f" Did you mean '{alike[0]}'{only}?"
        else:
            hint = suggest(value, SHORTHANDS) if isinstance(value, str) else ""
        yield f"{at}: got {_shown(value)}; accepted: the shorthands {', '.join(SHORTHANDS)}.{hint}"


def _pattern_problems(at: str, value: object) -> Iterator[str]:
    if not isinstance(value, str):
        yield f"{at}: got {_shown(value)}; a pattern is a string: a name, a glob, or 're:' and a regular expression."
        return
    try:
        Pattern(value)
    except ConfigError as error:
        yield f"{at}: {error}; correct it, or leave 're:' out to write a name or a glob."


def _raise_all(problems: Iterator[str]) -> None:
    if found := tuple(problems):
        raise ValueError(*found)


def _problems(model: type[_Strict], error: ValidationError) -> Iterator[str]:
    """The problems of a failed validation, one a line, in our words."""
    for item in error.errors(include_url=False):
        at = ".".join([model.title, *map(str, item["loc"])])
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):  # a slot's own problems, which start with the slot model's title
            yield from (at + line.removeprefix(SlotConfig.title) for line in str(cause).splitlines())
        elif isinstance(cause, ValueError):
            yield from (f"{at}{problem}" for problem in cause.args)
        elif item["type"] == "extra_forbidden":
            accepted, key = tuple(model.model_fields), str(item["loc"][-1])
            outer = model is SlotConfig and key in QuantizationConfig.model_fields
            hint = f" '{key}' stands beside the slots, not in one." if outer else suggest(key, accepted)
            yield f"{at}: unknown key; accepted: {', '.join(accepted)}.{hint}"
        else:
            yield f"{at}: got {_shown(item['input'])}; {item['msg']}."


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"quantization_config: the key '{key}' is written more than once; one of them would be lost.")
    return dict(pairs)


def _shown(value: object) -> str:
    """A value as a message shows it."""
    if value is None:
        return "null"
    return f"'{value}'" if isinstance(value, str) else f"{value!r} ({type(value).__name__})"
