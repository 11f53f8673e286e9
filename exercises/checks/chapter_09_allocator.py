"""Chapter 09's last exercise: an allocator of blocks with reference counts. The right answer is a cache of words that
follows the learner's tables: whatever a sequence reads back must be what it wrote."""

from __future__ import annotations

import random

from exercises import Exercise, Judge, Mistake


class Followed:
    """Carries out what the allocator says on a real array of tokens, and reads every sequence back."""

    def __init__(self, BlockAllocator, num_blocks: int, size: int, judge: Judge) -> None:
        self.allocator, self.num_blocks, self.size, self.judge = (
            BlockAllocator(num_blocks, size),
            num_blocks,
            size,
            judge,
        )
        self.memory: dict[tuple[int, int], str] = {}
        self.texts: dict[str, list[str]] = {}
        self.written = 0

    def table(self, name: str) -> list[int]:
        table = self.allocator.table(name)
        self.judge.type(table, list, "what table returns")
        known = all(type(block) is int and 0 <= block < self.num_blocks for block in table)
        self.judge.true(known, f"table({name!r}) is {table}; blocks are ints from 0 to {self.num_blocks - 1}.")
        needed = -(-len(self.texts[name]) // self.size)
        self.judge.equal(
            len(table),
            needed,
            f"blocks in the table of a sequence of {len(self.texts[name])} tokens, in blocks of {self.size}. Likely "
            "mistake: a block too many when the last one is exactly full, or too few when one is begun.",
        )
        return list(table)

    def held(self) -> set[int]:
        return {block for name in self.texts for block in self.table(name)}

    def write(self, name: str, position: int) -> None:
        self.written += 1
        self.texts[name][position] = f"{name}{self.written}"
        block = self.table(name)[position // self.size]
        self.memory[block, position % self.size] = self.texts[name][position]

    def add(self, name: str, tokens: int) -> bool:
        needed, free = -(-tokens // self.size), self.num_blocks - len(self.held())
        got = self.allocator.add(name, tokens)
        self.judge.type(got, bool, "what add returns")
        self.judge.equal(
            got,
            needed <= free,
            f"from add with {tokens} tokens in blocks of {self.size}, {free} blocks free. Likely mistake: rounded the "
            "wrong way, or the last free block not used.",
        )
        if got:
            self.texts[name] = [""] * tokens
            for position in range(tokens):
                self.write(name, position)
        return got

    def fork(self, name: str, child: str) -> None:
        self.allocator.fork(name, child)
        self.texts[child] = list(self.texts[name])

    def append(self, name: str) -> list | None:
        before, used = self.table(name), len(self.texts[name])
        others = {block for other in self.texts if other != name for block in self.table(other)}
        needs = used % self.size == 0 or before[-1] in others
        room = len(self.held()) < self.num_blocks
        got = self.allocator.append(name)
        if needs and not room:
            self.judge.true(got is None, f"append returned {got} with no block free; it must be None.")
            return None
        self.judge.type(got, list, "what append returns")
        copies = [tuple(pair) for pair in got]
        expected = int(used % self.size != 0 and before[-1] in others)
        self.judge.equal(
            len(copies),
            expected,
            f"copies in append's list {copies}, token {used} of the sequence, blocks of {self.size}. Likely mistake: a "
            "shared block that is written to is copied, a full one or one of its own is not.",
        )
        for source, target in copies:
            for place in range(self.size):
                self.memory[target, place] = self.memory.get((source, place), "")
        self.texts[name].append("")
        self.write(name, used)
        return copies

    def remove(self, name: str) -> None:
        self.allocator.remove(name)
        del self.texts[name]

    def read(self, what: str) -> None:
        for name, text in self.texts.items():
            table = self.table(name)
            found = [self.memory.get((table[t // self.size], t % self.size), "") for t in range(len(text))]
            self.judge.equal(found, text, f"{what}: what sequence {name!r} reads back.")

    def count(self, what: str) -> None:
        free = self.num_blocks - len(self.held())
        self.judge.equal(self.allocator.num_free(), free, f"from num_free, {what}")


def follow(BlockAllocator, judge: Judge, num_blocks: int = 8, size: int = 4) -> Followed:
    return Followed(BlockAllocator, num_blocks, size, judge)


def as_many_blocks_as_needed(BlockAllocator, judge: Judge) -> None:
    for tokens in (1, 3, 4, 5, 8, 9):
        pool = follow(BlockAllocator, judge)
        hint = "" if tokens == 1 else " Likely mistake: what an earlier one held, kept in the class and not in self."
        judge.equal(pool.allocator.num_free(), 8, f"from num_free of a new allocator of 8 blocks.{hint}")
        pool.add("a", tokens)
        pool.read("after add")
        pool.count(f"after adding {tokens} tokens in blocks of 4.")


def no_block_for_two(BlockAllocator, judge: Judge) -> None:
    pool = follow(BlockAllocator, judge)
    for name, tokens in (("a", 6), ("b", 5), ("c", 4)):
        pool.add(name, tokens)
    pool.read("three sequences that share nothing. Likely mistake: one block given to two of them")
    pool.count("with three sequences.")


def full_means_no(BlockAllocator, judge: Judge) -> None:
    pool = follow(BlockAllocator, judge, num_blocks=3)
    pool.add("a", 5)
    pool.add("b", 8)
    pool.count("after an add that was refused. Likely mistake: blocks taken before there was a look at how many.")
    pool.add("c", 4)
    pool.add("d", 1)
    pool.count("when all blocks are held.")


def grows_block_by_block(BlockAllocator, judge: Judge) -> None:
    pool = follow(BlockAllocator, judge, num_blocks=3)
    pool.add("a", 3)
    for _ in range(9):
        pool.append("a")
        pool.read("after append")
    pool.count("after growing to 12 tokens in blocks of 4.")
    pool.append("a")
    pool.count("after an append that was refused.")
    judge.equal(len(pool.table("a")), 3, "Likely mistake: something changed although append returned None.")


def removed_blocks_are_free_again(BlockAllocator, judge: Judge) -> None:
    pool = follow(BlockAllocator, judge, num_blocks=4)
    for turn in range(6):
        pool.add(f"a{turn}", 7)
        pool.add(f"b{turn}", 2)
        pool.append(f"b{turn}")
        pool.read("in a pool that is used again and again")
        pool.remove(f"a{turn}")
        pool.count("after remove. Likely mistake: a leak; blocks of a removed sequence must become free.")
        pool.remove(f"b{turn}")
        pool.count("after remove. Likely mistake: a leak; blocks of a removed sequence must become free.")


def a_fork_copies_nothing(BlockAllocator, judge: Judge) -> None:
    pool = follow(BlockAllocator, judge)
    pool.add("a", 6)
    pool.fork("a", "b")
    judge.equal(pool.table("b"), pool.table("a"), "A fork has the same blocks.")
    pool.count("after a fork, which takes no block.")
    pool.read("after a fork")


def writing_copies_a_shared_block(BlockAllocator, judge: Judge) -> None:
    pool = follow(BlockAllocator, judge)
    pool.add("a", 6)
    pool.fork("a", "b")
    old, copies = pool.table("a"), pool.append("b")
    judge.equal(copies[0][0], old[1], "The source of the copy is the shared block that is written to.")
    judge.equal(copies[0][1], pool.table("b")[1], "The target of the copy is the block now in its table.")
    judge.equal(pool.table("a"), old, "Likely mistake: two sequences with one table object, or the wrong one changed.")
    hint = "after a forked sequence wrote. Likely mistake: it wrote into a block that both hold"
    pool.read(hint)
    pool.append("a")
    pool.read(hint)
    pool.count("after both have written. Likely mistake: the old block's count, when one of its holders left it.")


def a_full_block_stays_shared(BlockAllocator, judge: Judge) -> None:
    pool = follow(BlockAllocator, judge)
    pool.add("a", 8)
    pool.fork("a", "b")
    pool.append("b")
    pool.append("a")
    pool.read("after a fork of two full blocks and an append to each")
    pool.count("after it. Likely mistake: a full shared block was copied, although nobody writes into it.")


def the_last_holder_frees(BlockAllocator, judge: Judge) -> None:
    pool = follow(BlockAllocator, judge)
    pool.add("a", 6)
    pool.fork("a", "b")
    pool.fork("b", "c")
    pool.remove("a")
    pool.count("after one of three holders was removed. Likely mistake: freed while others hold it.")
    pool.add("d", 14)
    pool.read("after the first of three forks was removed. Likely mistake: a stale block; theirs went to somebody else")
    pool.append("b")
    pool.remove("b")
    pool.append("c")
    pool.read("after two of three forks were removed")
    pool.remove("c")
    pool.count("after the last was removed. Likely mistake: a leak; the last holder frees the block.")


def no_room_for_a_copy(BlockAllocator, judge: Judge) -> None:
    pool = follow(BlockAllocator, judge, num_blocks=2)
    pool.add("a", 6)
    pool.fork("a", "b")
    pool.append("b")
    pool.read("after an append that had no room for a copy")
    pool.remove("a")
    pool.count("after the other holder left. Likely mistake: a count changed although append returned None.")
    pool.append("b")
    pool.read("after the other holder left. Likely mistake: a count changed although append returned None")
    pool.remove("b")
    pool.count("after all were removed. Likely mistake: a count changed although append returned None.")


def any_order_of_things(BlockAllocator, judge: Judge) -> None:
    for seed in range(12):
        draw = random.Random(seed)
        pool = follow(BlockAllocator, judge, draw.randint(3, 12), draw.randint(1, 5))
        for step in range(60):
            names, move = list(pool.texts), draw.random()
            if not names or move < 0.2:
                pool.add(f"s{step}", draw.randint(1, 12))
            elif move < 0.35:
                pool.fork(draw.choice(names), f"s{step}")
            elif move < 0.85:
                pool.append(draw.choice(names))
            else:
                pool.remove(draw.choice(names))
            pool.count("in a long run. Likely mistake: a leak, or a block freed twice.")
            pool.read("in a long run. Likely mistake: a stale block, held by two that know nothing of each other")


ALLOCATOR = Exercise(
    name="block_allocator",
    entry="BlockAllocator",
    title="Blocks with reference counts",
    chapter="09",
    difficulty=4,
    minutes=35,
    checks=[
        as_many_blocks_as_needed,
        no_block_for_two,
        full_means_no,
        grows_block_by_block,
        removed_blocks_are_free_again,
        a_fork_copies_nothing,
        writing_copies_a_shared_block,
        a_full_block_stays_shared,
        the_last_holder_frees,
        no_room_for_a_copy,
        any_order_of_things,
    ],
    mistakes=[
        Mistake(
            "a block too many",
            "as_many_blocks_as_needed",
            edit=("-(-tokens // self.block_size)", "tokens // self.block_size + 1"),
        ),
        Mistake(
            "a block too few",
            "as_many_blocks_as_needed",
            edit=("-(-tokens // self.block_size)", "max(1, tokens // self.block_size)"),
        ),
        Mistake(
            "given and still free",
            "as_many_blocks_as_needed",
            edit=("[self.free.pop() for _ in range(needed)]", "self.free[:needed]"),
        ),
        Mistake("never looks", "full_means_no", edit=("if needed > len(self.free):", "if False:")),
        Mistake(
            "keeps one back", "full_means_no", edit=("if needed > len(self.free):", "if needed >= len(self.free):")
        ),
        Mistake(
            "length does not move",
            "grows_block_by_block",
            edit=("        self.lengths[name] += 1\n        return copies", "        return copies"),
        ),
        Mistake(
            "a new block too late", "grows_block_by_block", edit=("% self.block_size == 0", "% self.block_size == 1")
        ),
        Mistake(
            "counts although refused",
            "no_room_for_a_copy",
            edit=(
                "            if not self.free:\n",
                "            if not self.free:\n                self.counts[table[-1]] -= shared\n",
            ),
        ),
        Mistake(
            "leak",
            "removed_blocks_are_free_again",
            edit=("                self.free.append(block)", "                pass"),
        ),
        Mistake(
            "frees the last block alone",
            "removed_blocks_are_free_again",
            edit=("for block in self.tables.pop(name):", "for block in self.tables.pop(name)[-1:]:"),
        ),
        Mistake(
            "a fork with blocks of its own",
            "a_fork_copies_nothing",
            edit=(
                "self.tables[child] = list(self.tables[name])",
                "self.tables[child] = [self.free.pop() for _ in self.tables[name]]",
            ),
        ),
        Mistake(
            "one table for two",
            "writing_copies_a_shared_block",
            edit=(
                "list(self.tables[name])\n        self.lengths[child]",
                "self.tables[name]\n        self.lengths[child]",
            ),
        ),
        Mistake(
            "writes into a shared block",
            "writing_copies_a_shared_block",
            edit=("shared = self.counts[table[-1]] > 1", "shared = False"),
        ),
        Mistake(
            "copies the wrong way round",
            "writing_copies_a_shared_block",
            edit=("[(table[-1], block)]", "[(block, table[-1])]"),
        ),
        Mistake(
            "forgets to let go of the source",
            "writing_copies_a_shared_block",
            edit=("                self.counts[table[-1]] -= 1\n", ""),
        ),
        Mistake(
            "a full block is copied too",
            "a_full_block_stays_shared",
            edit=("            if full:\n", "            if full and not shared:\n"),
        ),
        Mistake(
            "freed while others hold it",
            "the_last_holder_frees",
            edit=("if self.counts[block] == 0:", "if self.counts[block] >= 0:"),
        ),
        Mistake(
            "forks are not counted",
            "writing_copies_a_shared_block",
            edit=("            self.counts[block] += 1", "            pass"),
        ),
        Mistake(
            "counts in blocks of 4",
            "any_order_of_things",
            edit=("-(-tokens // self.block_size)", "-(-tokens // 4)"),
        ),
        Mistake("grows in blocks of 4", "any_order_of_things", edit=("% self.block_size == 0", "% 4 == 0")),
        Mistake(
            "no more than two",
            "the_last_holder_frees",
            edit=("            self.counts[block] += 1", "            self.counts[block] = 2"),
        ),
    ],
    forbids=("minillm.block_pool", "minillm.allocators", "minillm.batching"),
)
