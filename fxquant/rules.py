"""Which layer gets which scheme, by name: patterns, fused names, and the checks that rules do not contradict each other."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher, get_close_matches

from .errors import ConfigError, RuleError
from .patterns import Pattern, PatternSet
from .schemes import SHORTHANDS, SchemeRequest, Slot

LINEAR_KINDS = frozenset({"linear", "qkv", "row", "merged_column"})
"""Kinds of layer that the linear slot serves; the last three are what vLLM calls its fused and sharded linears."""

PROTECTED_KINDS = frozenset({"head", "router"})
"""Kinds that stay as they are unless a target is their very name."""

MATCHABLE_KINDS = LINEAR_KINDS | PROTECTED_KINDS | {"moe", "embedding", "lm_head"}
"""Kinds on which a pattern counts as matched; any other kind is a module that no rule can reach."""

PACKED_MODULES: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Fused name -> the names of its shards, as last components of a layer's name."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The merged configuration: a scheme for each slot, or targets, and what to leave alone.

    Args:
        linear: the request for linear layers, None to leave them as they are.
        moe: the request for expert layers, None to leave them as they are.
        linear_origin: where ``linear`` comes from, or why it is None; printed with each layer.
        moe_origin: the same for ``moe``.
        targets: (pattern, shorthand name) pairs; where there are any, they alone choose schemes.
        ignore: patterns of the layers to leave as they are.
        scale_search: how the block scales of 4-bit weights are found; other formats ignore it.
    """

    linear: SchemeRequest | None = None
    moe: SchemeRequest | None = None
    linear_origin: str = "no rule"
    moe_origin: str = "no rule"
    targets: tuple[tuple[Pattern, str], ...] = ()
    ignore: tuple[Pattern, ...] = ()
    scale_search: str = "amax"

    def slot(self, slot: Slot) -> tuple[SchemeRequest | None, str]:
        """The slot's request and its origin."""
        return (self.linear, self.linear_origin) if slot == "linear" else (self.moe, self.moe_origin)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What becomes of one layer.

    Args:
        request: the scheme asked for, or None: the layer stays as it is.
        rule: the rule that decided, e.g. ``from targets: *o_proj, mxfp4`` or ``ignored: *o_proj``; without one, ``head``,
            ``router``, ``embedding``, ``no rule``, or the layer's kind.
        fused_name: the virtual fused name that the rule hit, where the shards' own names would not have decided the same.
    """

    request: SchemeRequest | None
    rule: str
    fused_name: str | None = None

    @property
    def reason(self) -> str:
        """Why the layer stays as it is; empty when it is quantised."""
        return self.rule if self.request is None else ""

    def searching(self, scale_search: str) -> Decision:
        """The decision with this search for block scales, which the rule then names; itself where that changes nothing."""
        request = self.request and self.request.searching(scale_search)
        if request == self.request:
            return self
        return replace(self, request=request, rule=f"{self.rule}, scale_search {scale_search}")


def decide(
    layers: Mapping[str, str],
    policy: Policy,
    packed_modules_mapping: Mapping[str, Sequence[str]] | None = None,
    strict: bool = False,
    aliases: Mapping[str, Sequence[str]] | None = None,
    containers: Iterable[str] = (),
) -> dict[str, Decision]:
    """The decision for every layer, in the order of ``layers``.

    Args:
        layers: layer name -> kind: ``linear`` (also qkv, row, merged_column), ``moe``, ``head``, ``router``, ``embedding``;
            any other kind is not a candidate.
        policy: the merged configuration.
        packed_modules_mapping: fused name -> shard names, added to ``PACKED_MODULES``; an empty mapping fuses nothing.
        strict: also refuse a pattern that matches nothing.
        aliases: expert layer -> names of its parameters, which a pattern reaches only by spelling them out.
        containers: names of modules that are not layers, for the hints of ``strict``.

    Raises:
        RuleError: one error for every layer whose rules contradict each other and every pattern that ``strict`` refuses.
        ConfigError: ``packed_modules_mapping`` is malformed.
    """
    packed = packed_table(packed_modules_mapping)
    aliases = aliases or {}
    targets, ignore = PatternSet(pattern for pattern, _ in policy.targets), PatternSet(policy.ignore)
    values = dict(policy.targets)
    decisions: dict[str, Decision] = {}
    problems: list[_Problem] = []
    for site in _sites(layers, packed, aliases):
        outcome = _decide_site(site, policy, targets, ignore, values)
        if isinstance(outcome, _Problem):
            problems.append(outcome)
        else:
            decisions.update(dict.fromkeys(site.layers, outcome.searching(policy.scale_search)))
    stray = unmatched(layers, policy, packed_modules_mapping, aliases, containers) if strict else []
    if stray:
        stray.append("(strict=False, on the command line --allow-unmatched, makes a pattern without a match a warning.)")
    if problems or stray:
        at_fault = {name for problem in problems for name in problem.site.layers}
        raise RuleError("\n".join([*_report(problems), *stray]), (name for name in layers if name in at_fault))
    return {name: decisions[name] for name in layers}


def unmatched(
    layers: Mapping[str, str],
    policy: Policy,
    packed_modules_mapping: Mapping[str, Sequence[str]] | None = None,
    aliases: Mapping[str, Sequence[str]] | None = None,
    containers: Iterable[str] = (),
) -> list[str]:
    """One message for each pattern that reaches no layer, with the nearest names; arguments as for ``decide``.

    A pattern counts as matched when it hits a candidate, a head, a router, an embedding, a fused name (virtual or real), a
    shard of a real fused layer, or spells out an alias. A mere container does not count.
    """
    layer_names = [name for name, kind in layers.items() if kind in MATCHABLE_KINDS]
    reachable = dict.fromkeys(layer_names)
    for site in _sites(layers, packed_table(packed_modules_mapping), {}):
        reachable.update(dict.fromkeys((site.name, *site.shards) if site.shards else ()))
    spelled_out = {alias for names in (aliases or {}).values() for alias in names}
    inhabited = dict.fromkeys(prefix for name in layer_names for prefix in _prefixes(name))
    bare = [name for name, kind in layers.items() if kind not in MATCHABLE_KINDS]
    others = [name for name in dict.fromkeys((*containers, *bare)) if name not in inhabited and name not in reachable]

    messages = []
    patterns = [("targets", pattern) for pattern, _ in policy.targets] + [("ignore", pattern) for pattern in policy.ignore]
    for where, pattern in dict.fromkeys(patterns):
        if pattern.text in reachable or pattern.text in spelled_out:
            continue
        if not pattern.is_exact and any(pattern.matches(name) for name in reachable):
            continue
        if inside := [name for name in inhabited if pattern.matches(name)]:
            found = f"hits no layer, only modules that hold layers ({_some(inside)})"
            remedy = f"Write '{_inner(pattern, inside[0], reachable)}' for the layers inside."
        elif beside := [name for name in others if pattern.matches(name)]:
            found = f"hits only modules that have no weight to quantise ({_some(beside)})"
            remedy = "Rules reach linear and expert layers, heads, routers and embeddings: take the pattern out."
        else:
            found = "matches no layer"
            near = _nearest(pattern, layer_names)
            remedy = f"Nearest: {', '.join(near)}." if near else "No layer has a name like it."
        messages.append(f"{where} pattern '{pattern}' {found}. {remedy}")
    return messages


def packed_table(packed_modules_mapping: Mapping[str, Sequence[str]] | None) -> dict[str, tuple[str, ...]]:
    """Fused name -> shard names: the default table with the argument's entries first; an empty argument fuses nothing.

    Raises:
        ConfigError: an entry is not a name with a list of names, or a name has more than one component.
    """
    if packed_modules_mapping is None:
        return dict(PACKED_MODULES)
    if not isinstance(packed_modules_mapping, Mapping):
        raise ConfigError(f"packed_modules_mapping: got {packed_modules_mapping!r}; write a dict of fused name -> shard names.")
    for fused, shards in packed_modules_mapping.items():
        listed = isinstance(shards, Sequence) and not isinstance(shards, str)
        names = [fused, *shards] if listed else []
        if not listed or not all(isinstance(name, str) and name and "." not in name for name in names):
            raise ConfigError(
                f"packed_modules_mapping[{fused!r}]: got {shards!r}; write a list of shard names, fused name and shards "
                "each the last component of a layer's name, e.g. {'qkv_proj': ['q_proj', 'k_proj', 'v_proj']}."
            )
    given = {fused: tuple(shards) for fused, shards in packed_modules_mapping.items()}
    return given | {fused: shards for fused, shards in PACKED_MODULES.items() if fused not in given} if given else {}


@dataclass(frozen=True, kw_only=True)
class _Site:
    """What is decided at once: one layer, or the separate shards of one virtual fused layer.

    ``name`` is looked up first; ``shards`` where it is not hit. ``layers`` get the decision.
    """

    name: str
    kind: str
    layers: tuple[str, ...]
    shards: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    virtual: bool = False

    @property
    def slot(self) -> Slot:
        return "moe" if self.kind == "moe" else "linear"


@dataclass(frozen=True, kw_only=True)
class _Problem:
    site: _Site
    found: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class _Hits:
    """What a set of patterns hits at a site: patterns by the name they hit, and the shards that were looked up in vain."""

    by_name: dict[str, list[Pattern]]
    missed: list[str] = field(default_factory=list)

    @property
    def patterns(self) -> list[Pattern]:
        return list(dict.fromkeys(pattern for patterns in self.by_name.values() for pattern in patterns))


def _sites(
    layers: Mapping[str, str], packed: Mapping[str, tuple[str, ...]], aliases: Mapping[str, Sequence[str]]
) -> Iterator[_Site]:
    groups = _virtual_groups(layers, packed)
    for name, kind in layers.items():
        last = _last(name)
        if name in groups:
            site = groups[name]
            if site.layers[0] == name:
                yield site
        elif kind in LINEAR_KINDS and last in packed:
            shards = tuple(_renamed(name, last, shard) for shard in packed[last])
            yield _Site(name=name, kind=kind, layers=(name,), shards=shards)
        else:
            yield _Site(name=name, kind=kind, layers=(name,), aliases=tuple(aliases.get(name, ())))


def _renamed(name: str, fused: str, shard: str) -> str:
    """A real fused layer's name with a shard's in its place, in every component that repeats it (as vLLM does)."""
    return ".".join(shard if component == fused else component for component in name.split("."))


def _virtual_groups(layers: Mapping[str, str], packed: Mapping[str, tuple[str, ...]]) -> dict[str, _Site]:
    """Shard layer -> its group, for every parent that holds two or more shards of a fused name but no layer of that name."""
    children: dict[str, dict[str, None]] = defaultdict(dict)
    for name, kind in layers.items():
        if kind in LINEAR_KINDS:
            parent, _, last = name.rpartition(".")
            children[parent][last] = None
    groups: dict[str, _Site] = {}
    for parent, names in children.items():
        absent = {fused: shards for fused, shards in packed.items() if fused not in names}
        present = [(fused, [name for name in names if name in shards]) for fused, shards in absent.items()]
        # Where two fused names claim a shard, the one with more of its shards here has it.
        for fused, shards in sorted(present, key=lambda entry: -len(entry[1])):
            members = tuple(_join(parent, shard) for shard in shards)
            if len(members) > 1 and not any(member in groups for member in members):
                site = _Site(name=_join(parent, fused), kind="linear", layers=members, shards=members, virtual=True)
                groups.update(dict.fromkeys(members, site))
    return groups


def _decide_site(
    site: _Site, policy: Policy, targets: PatternSet, ignore: PatternSet, values: Mapping[Pattern, str]
) -> Decision | _Problem:
    if site.kind in PROTECTED_KINDS:
        exact = targets.exact.get(site.name)
        if exact is None:
            return Decision(request=None, rule=site.kind)
        targeted = _Hits(by_name={site.name: [exact]})
    elif site.kind in LINEAR_KINDS or site.kind == "moe":
        targeted = _look_up(targets, site)
    else:
        return Decision(request=None, rule="head" if site.kind == "lm_head" else site.kind)
    ignored = _look_up(ignore, site)
    problem = _half_hit("ignore", site, ignored) or _contradiction(site, targeted, ignored, values)
    if problem is not None:
        return problem
    if ignored.by_name:
        rule = f"ignored: {_listed(ignored.patterns)}"
        return Decision(request=None, rule=rule, fused_name=_through_fused_name(site, ignored))
    if not targeted.by_name:
        request, origin = policy.slot(site.slot)
        return Decision(request=request, rule=origin)
    shorthand = values[targeted.patterns[0]]
    request = SHORTHANDS[shorthand].request(site.slot)
    if request is None:
        able = [name for name, other in SHORTHANDS.items() if other.request(site.slot) is not None]
        return _Problem(
            site=site,
            found=f"targets {_quoted(targeted.patterns)} asks for {shorthand}, which defines no {site.slot} method",
            remedy=f"{site.slot} layers take one of {', '.join(able)}: use one of these, or narrow the pattern.",
        )
    rule = f"from targets: {_listed(targeted.patterns)}, {shorthand}"
    return Decision(request=request, rule=rule, fused_name=_through_fused_name(site, targeted))


def _look_up(patterns: PatternSet, site: _Site) -> _Hits:
    own = {site.name: patterns.hits(site.name)} | {
        alias: [patterns.exact[alias]] for alias in site.aliases if alias in patterns.exact
    }
    by_name = {name: hits for name, hits in own.items() if hits}
    if by_name:
        return _Hits(by_name=by_name)
    shards = {shard: patterns.hits(shard) for shard in site.shards}
    return _Hits(
        by_name={shard: hits for shard, hits in shards.items() if hits},
        missed=[shard for shard, hits in shards.items() if not hits],
    )


def _half_hit(where: str, site: _Site, hits: _Hits) -> _Problem | None:
    if not hits.by_name or not hits.missed:
        return None
    covered = ", ".join(f"{_last(name)} (by {_quoted(patterns)})" for name, patterns in hits.by_name.items())
    return _Problem(
        site=site,
        found=f"{where} hits its shards {covered} but not {', '.join(map(_last, hits.missed))}",
        remedy=f"The shards of one fused layer share one scheme: name all of {', '.join(map(_last, site.shards))}, "
        f"or the fused name {_last(site.name)}.",
    )


def _contradiction(site: _Site, targeted: _Hits, ignored: _Hits, values: Mapping[Pattern, str]) -> _Problem | None:
    """Two targets on one name, targets beside ignore, a half-targeted group, or shards with different schemes."""
    for name, patterns in targeted.by_name.items():
        if len(patterns) > 1:
            hits = ", ".join(f"'{pattern}' ({values[pattern]})" for pattern in patterns)
            at = "" if name == site.name else f"{_last(name)} is "
            return _Problem(
                site=site,
                found=f"{at}hit by {len(patterns)} targets: {hits}",
                remedy="One name takes one target, even where their schemes agree: narrow the patterns until one hits it.",
            )
    if targeted.by_name and ignored.by_name:
        return _Problem(
            site=site,
            found=f"hit by targets {_quoted(targeted.patterns)} and by ignore {_quoted(ignored.patterns)}",
            remedy="A layer is either a target or ignored: narrow one of the two patterns.",
        )
    if problem := _half_hit("targets", site, targeted):
        return problem
    if len({values[pattern] for pattern in targeted.patterns}) > 1:
        schemes = (f"{_last(name)} {values[pattern]} (by '{pattern}')" for name, (pattern,) in targeted.by_name.items())
        parts = "parameters of one expert layer" if site.aliases else "shards of one fused layer"
        return _Problem(
            site=site,
            found=f"targets give its parts different schemes: {', '.join(schemes)}",
            remedy=f"The {parts} share one scheme: give all of them the same shorthand.",
        )
    return None


def _through_fused_name(site: _Site, hits: _Hits) -> str | None:
    """The virtual fused name, if it decided and the patterns that hit it do not hit every shard as well."""
    patterns = hits.by_name.get(site.name, []) if site.virtual else []
    direct = all(any(pattern.matches(shard) for pattern in patterns) for shard in site.shards)
    return site.name if patterns and not direct else None


def _report(problems: Iterable[_Problem]) -> Iterator[str]:
    """The problems as lines, layer by layer, with each remedy said once below the layers that it serves."""
    by_remedy: dict[str, list[_Problem]] = defaultdict(list)
    for problem in problems:
        by_remedy[problem.remedy].append(problem)
    for remedy, same in by_remedy.items():
        yield from (f"{', '.join(problem.site.layers)}: {problem.found}." for problem in same)
        yield f"    {remedy}"


def _nearest(pattern: Pattern, names: Sequence[str], count: int = 4) -> list[str]:
    """Layers that the writer may have meant: the same tail, then siblings and like-named layers, closest first."""
    literal = re.sub(r"[^\w.]", "", pattern.text.removeprefix("re:").replace(".*", "")).strip(".")
    if not literal:
        return list(names[:count])
    same_tail = [name for name in names if f".{name}".endswith(f".{literal}") or f".{literal}".endswith(f".{name}")]
    owner = [name for name in names if literal.startswith(f"{name}.")]
    parent, _, last = literal.rpartition(".")
    siblings = [name for name in names if parent and name.rpartition(".")[0] == parent]
    tails = set(get_close_matches(last, dict.fromkeys(_last(name) for name in names), n=3, cutoff=0.6))
    alike = [name for name in names if _last(name) in tails]
    parts = literal.split(".")
    alike.sort(key=lambda name: -sum(mine == theirs for mine, theirs in zip(parts, name.split("."), strict=False)))
    # A full comparison is slow, and in a deep model hundreds of like-named layers differ in a number only.
    pool = list(dict.fromkeys([*siblings, *alike[:100]])) or list(names[:100])
    ranked = sorted(pool, key=lambda name: -_likeness(literal, name))
    return list(dict.fromkeys([*same_tail[:2], *owner[:1], *ranked]))[:count]


def _likeness(literal: str, name: str) -> float:
    """How alike a name's end, as many components as were written, is to what was written."""
    end = ".".join(name.split(".")[-len(literal.split(".")) :])
    return SequenceMatcher(None, literal, end, autojunk=False).ratio()


def _inner(pattern: Pattern, container: str, reachable: Iterable[str]) -> str:
    """The pattern rewritten for the layers inside the containers that it hits."""
    text = pattern.text.rstrip("$") + r"\..*" if pattern.is_regex else f"{pattern.text}.*"
    try:
        rewritten = Pattern(text)
    except ConfigError:
        return f"{container}.*"
    return text if any(rewritten.matches(name) for name in reachable) else f"{container}.*"


def _prefixes(name: str) -> Iterator[str]:
    parent = name.rpartition(".")[0]
    while parent:
        yield parent
        parent = parent.rpartition(".")[0]


def _join(parent: str, child: str) -> str:
    return f"{parent}.{child}" if parent else child


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _listed(patterns: Iterable[Pattern]) -> str:
    return ", ".join(map(str, patterns))


def _quoted(patterns: Iterable[Pattern]) -> str:
    return ", ".join(f"'{pattern}'" for pattern in patterns)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
