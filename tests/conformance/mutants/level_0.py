"""Declarations that lie or say too little."""

from .mutant import Mutant

MUTANTS = (
    Mutant(
        "accepts_any_device", "L0", "a device of unknown kind is accepted", "spec.py",
        'return Unsupported("device", facts.kind, ["cpu", "cuda"])',
        "return None",
        cases=("devices",),
    ),
    Mutant(
        "fails_open", "L0", "a feature that it does not know is accepted: the refusal does not happen",
        "spec.py",
        "refused = CAPABILITIES.check(query)",
        "from dataclasses import fields\n"
        "known = {f.name: getattr(query, f.name) for f in fields(AttentionQuery)}\n"
        "refused = CAPABILITIES.check(AttentionQuery(**known))",
        cases=("fails_closed",), reports=("A27", "A30"),
    ),
    Mutant(
        "refusal_says_too_little", "L0", "a refusal does not say what is allowed", "spec.py",
        'refused = Unsupported("quant", query.quant, [wanted])',
        'refused = Unsupported("quant", query.quant, None)',
        cases=("refusals",),
    ),
    Mutant(
        "imports_torch", "L0", "the module of the declaration imports torch", "spec.py",
        "from collections.abc import Mapping, Sequence",
        "from collections.abc import Mapping, Sequence\nimport torch",
        cases=("no_torch",),
    ),
    Mutant(
        "layouts_for_anything", "L0", "layouts are offered for a content that it does not know", "spec.py",
        "if not isinstance(content, KVHeads):",
        'content = content if isinstance(content, KVHeads) else KVHeads(1, 8, dtype="float16")\n'
        "if content is None:",
        cases=("fails_closed",),
    ),
    Mutant(
        "two_layouts_of_one_name", "L0", "two layouts carry one name", "spec.py",
        "second = hnd(content)",
        'second = hnd(content, name="nhd")',
        cases=("layouts",),
    ),
    Mutant(
        "layout_forgets_v", "L0", "a layout gives values the dimension of keys: page bytes are wrong",
        "spec.py",
        "first = nhd(content)",
        "first = nhd(KVHeads(content.num_kv_heads, content.head_dim, None, content.dtype, content.quant))",
        cases=("layouts", "page_bytes"),
    ),
    Mutant(
        "packs_two_tokens", "L0", "blocks of any size are declared, but the layout packs two tokens",
        "spec.py",
        "return [LayoutOption(layout, blocks) for layout in (first, second)]",
        "from dataclasses import replace\n"
        "from kvcore.spec.layout import Axis\n"
        'two = Axis("token", 2)\n'
        "packed = [replace(f, axes=(f.axes[0], two, *f.axes[1:])) for f in first.fields]\n"
        "first = replace(first, fields=tuple(packed))\n"
        "return [LayoutOption(layout, blocks) for layout in (first, second)]",
        cases=("page_bytes",), reports=("A17",),
    ),
    Mutant(
        "upper_case_name", "L0", "the name is not lower case", "spec.py",
        'name = "reference"',
        'name = "Reference"',
        cases=("contract",),
    ),
    Mutant(
        "flag_is_no_bool", "L0", "a flag is declared in words", "spec.py",
        "graph_capture = False",
        'graph_capture = "sometimes"',
        cases=("contract",),
    ),
    Mutant(
        "priority_in_words", "L0", "a priority is no number", "spec.py",
        'priority: ClassVar[Mapping[str, int]] = {"cpu": 1}',
        'priority = {"cpu": "high"}',
        cases=("contract",),
    ),
    Mutant(
        "offsets_of_32_bits", "L0", "offset bits that no kernel has", "spec.py",
        "max_offset_bits = 63",
        "max_offset_bits = 32",
        cases=("contract",), reports=("A35",),
    ),
    Mutant(
        "option_without_default", "L0", "an option has no default", "spec.py",
        "verbose: bool = False",
        "verbose: bool",
        cases=("contract", "options"),
    ),
    Mutant(
        "options_of_another_type", "L0", "the options are a dict, not a dataclass", "spec.py",
        "Config = ReferenceOptions",
        "Config = dict",
        cases=("options", "contract"),
    ),
    Mutant(
        "stand_in_that_is_no_option", "L0", "a stand-in is declared that no option switches on", "spec.py",
        "stand_ins: ClassVar[Mapping[str, str]] = {}",
        'stand_ins = {"emulate": "emulated"}',
        cases=("stand_ins",),
    ),
    Mutant(
        "changes_its_mind", "L0", "asked twice, the declaration answers in two ways", "spec.py",
        "return None  # needs torch alone",
        'cls.asked = not getattr(cls, "asked", False)\n'
        'return None if cls.asked else "warming up"',
        cases=("stable",),
    ),
    Mutant(
        "no_core_profile", "L0", "a layer without a window is refused: no core profile is held", "spec.py",
        "if refused is None and query.quant != wanted:",
        "if query.mask.window is None:\n"
        '    return Unsupported("window", None, "a window")\n'
        "if refused is None and query.quant != wanted:",
        cases=("core_profile",),
    ),
)  # fmt: skip
