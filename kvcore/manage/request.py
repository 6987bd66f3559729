"""What the manager keeps for one request: its tokens, its digest chain and its row in every group."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvcore.manage.block_hash import BlockHasher, Extra, Multimodal
from kvcore.manage.group_rule import GroupRule
from kvcore.manage.prefix_cache import Hit
from kvcore.manage.step import TableDelta

_NEVER_SENT = -1


class BlockRow:
    """The blocks of one request in one group, by block index (``token // block size``).

    ::

        index      held        first             end
                    |            |                |
        ids      [ 31  |  8  |  37  |  12  |  44 ]
                   not yet       what the worker
                   committed     has in its table

    A block leaves the table in the step that no longer reads it, but stays held until the step that wrote
    it is committed, so that its content can still enter the prefix cache.

    Attributes:
        ids: Blocks held, from index `held` on.
        held: Index of ``ids[0]``.
        first: Index of the first block in the table, never below `held`.
        sent: `first` as the worker has it, or -1 while it has no row.
        registered: Blocks below this index have been offered to the prefix cache.
    """

    __slots__ = ("first", "held", "ids", "registered", "sent")

    def __init__(self, first: int = 0, ids: Sequence[int] = (), registered: int = 0) -> None:
        self.ids = list(ids)
        self.held = self.first = first
        self.sent = _NEVER_SENT
        self.registered = registered

    @property
    def end(self) -> int:
        """One past the index of the last block."""
        return self.held + len(self.ids)

    def visible(self) -> list[int]:
        """The ids in the table, from index `first` on."""
        return self.ids[self.first - self.held :]

    def copy(self) -> BlockRow:
        """The same blocks for a child, whom the worker does not know yet."""
        row = BlockRow(self.held, self.ids, self.registered)
        row.first = self.first
        return row

    def cut_front(self, index: int) -> list[int]:
        """Give up the blocks below `index`; returns them, the last first."""
        count = index - self.held
        if count <= 0:
            return []
        gone = self.ids[:count]
        del self.ids[:count]
        self.held = index
        self.first = max(self.first, index)
        gone.reverse()
        return gone

    def send(self, kept_to: int) -> TableDelta:
        """The delta that brings the worker's row here, when its blocks below index `kept_to` still hold."""
        if self.sent == _NEVER_SENT:
            drop, keep = self.first, 0
        else:
            drop, keep = self.first - self.sent, kept_to - self.first
        self.sent = self.first
        return TableDelta(drop, keep, tuple(self.ids[self.first - self.held + keep :]))


class RequestState:
    """One request, from `begin` to `free`.

    Attributes:
        request_id: The caller's name for it.
        tokens: Known token ids: the prompt, and what was sampled and committed.
        prompt_tokens: Length of the prompt.
        salt, extras: What else the prefix depends on.
        root: Where its digest chain starts.
        digests: The chain so far.
        rows: One a group; empty before admission.
        computed: Tokens given to steps so far, whether or not those are committed.
        committed: Tokens whose content is computed for sure.
        in_flight: Steps that include it and are not committed.
        last_step: The last step that may read its blocks.
        epoch: Of the prefix cache when it was admitted; a reset keeps what ran before it out of the index.
        alive: False once freed; steps in flight then pass over it.
        hit_memo: The last lookup, with the version of the index that it holds for.
    """

    __slots__ = (
        "alive",
        "committed",
        "computed",
        "digests",
        "epoch",
        "extras",
        "hit_memo",
        "in_flight",
        "items",
        "last_step",
        "prompt_tokens",
        "request_id",
        "root",
        "rows",
        "salt",
        "tokens",
    )

    def __init__(self, request_id: str, tokens: array[int], root: bytes, salt: str, extras: tuple[Extra, ...]) -> None:
        self.request_id = request_id
        self.tokens = tokens
        self.prompt_tokens = len(tokens)
        self.root = root
        self.salt = salt
        self.extras = extras
        self.items = tuple(e for e in extras if isinstance(e, Multimodal))
        self.epoch = 0
        self.digests: list[bytes] = []
        self.rows: list[BlockRow] = []
        self.computed = self.committed = self.in_flight = self.last_step = 0
        self.alive = True
        self.hit_memo: tuple[int, Hit] | None = None

    @property
    def admitted(self) -> bool:
        """Whether it has been part of a step (or is a fork of one that has)."""
        return bool(self.rows)

    def hash_to(self, hasher: BlockHasher, tokens: int) -> None:
        """Extend the chain over the known tokens, if it does not reach token `tokens` yet."""
        if len(self.digests) * hasher.block_size + hasher.block_size <= tokens:
            hasher.extend(self.digests, self.root, self.tokens, self.items)

    def tail_first(self, rules: Sequence[GroupRule]) -> list[int]:
        """All its blocks by the tokens where they end, the last first, over all groups.

        In this order a freed request loses its prefix from the tail, in every group alike.
        """
        if len(self.rows) == 1:
            return self.rows[0].ids[::-1]
        ends = [
            ((row.held + i + 1) * rule.block_size, block)
            for rule, row in zip(rules, self.rows, strict=False)
            for i, block in enumerate(row.ids)
        ]
        ends.sort(key=lambda pair: -pair[0])
        return [block for _, block in ends]

    def fork(self, request_id: str) -> RequestState:
        """A child with the same tokens, blocks and steps in flight; the caller counts the shared blocks."""
        child = RequestState(request_id, self.tokens[:], self.root, self.salt, self.extras)
        child.epoch = self.epoch
        child.prompt_tokens = self.prompt_tokens
        child.digests = self.digests[:]
        child.rows = [row.copy() for row in self.rows]
        child.computed, child.committed = self.computed, self.committed
        child.in_flight, child.last_step = self.in_flight, self.last_step
        return child
