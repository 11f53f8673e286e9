"""Chapter 11, prefix caching: chained block keys, the longest match, eviction order, reload or recompute.

The right answers come from struct and one digest over all that came before, from counting down instead of up, from
sorting by last use, and from exact fractions.
"""

from __future__ import annotations

import hashlib
import random
import struct

from exercises import Exercise, Judge, Mistake

from .chapter_11_reload import RELOAD

# --- block_keys


def keys_by_recursion(ids: list[int], size: int, root: bytes) -> list[bytes]:
    """From the last full block back to the first."""
    full = len(ids) // size
    if full == 0:
        return []
    before = keys_by_recursion(ids[: (full - 1) * size], size, root)
    tokens = struct.pack(f"<{size}q", *ids[(full - 1) * size : full * size])
    return [*before, hashlib.sha256((before[-1] if before else root) + tokens).digest()]


def keys_of(block_keys, judge: Judge, ids: list[int], size: int, *root: bytes) -> list[bytes]:
    got = block_keys(ids, size, *root)
    judge.type(got, list)
    for key in got:
        judge.type(key, bytes, "a key")
    return got


def one_block_is_one_digest(block_keys, judge: Judge) -> None:
    want = hashlib.sha256(bytes([1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0])).digest()
    judge.equal(
        keys_of(block_keys, judge, [1, 2], 2),
        [want],
        "for tokens 1 and 2 in a block of 2. Likely mistake: a token is 8 bytes, the least significant first.",
    )


def full_blocks_alone_have_keys(block_keys, judge: Judge) -> None:
    for ids, size, count in (([], 4, 0), ([1, 2, 3], 4, 0), ([1, 2, 3, 4], 4, 1), ([1, 2, 3, 4, 5], 4, 1), ([7], 1, 1)):
        judge.equal(
            len(keys_of(block_keys, judge, ids, size)),
            count,
            f"keys for {len(ids)} tokens in blocks of {size}. Likely mistake: a key for a block that is not full, or "
            "none for the last one that is.",
        )


def a_key_stands_for_all_before_it(block_keys, judge: Judge) -> None:
    one, other = keys_of(block_keys, judge, [1, 1, 5, 6], 2), keys_of(block_keys, judge, [2, 2, 5, 6], 2)
    judge.true(
        one[1] != other[1],
        "The same two tokens after different ones have the same key. Likely mistake: a key made of the block alone; "
        "the key before it belongs in.",
    )
    third, moved = keys_of(block_keys, judge, [1, 2, 3, 4, 9], 1), keys_of(block_keys, judge, [5, 2, 3, 4, 9], 1)
    judge.true(
        all(a != b for a, b in zip(third, moved)),
        "The first token differs and a later key is the same. Likely mistake: every block is chained to the root, "
        "or to the tokens just before it.",
    )


def the_root_enters_first(block_keys, judge: Judge) -> None:
    plain, salted = (keys_of(block_keys, judge, [1, 2, 3, 4], 2, root) for root in (b"", b"tenant"))
    judge.true(
        not set(plain) & set(salted),
        "Two tenants with different roots share a key. Likely mistake: the chain begins without the root.",
    )


def keys_are_exact(block_keys, judge: Judge) -> None:
    rng = random.Random(0)
    for size in (1, 3, 4):
        ids = [rng.randrange(200_000) for _ in range(17)]
        for root in (b"", b"adapter-7"):
            judge.equal(
                keys_of(block_keys, judge, ids, size, root),
                keys_by_recursion(ids, size, root),
                f"for 17 tokens in blocks of {size}. Likely mistake: other bytes are hashed than the statement says: "
                "the key before, then 8 bytes a token.",
            )


KEYS = Exercise(
    name="block_keys",
    title="Chained block keys",
    chapter="11",
    difficulty=2,
    minutes=20,
    checks=[
        one_block_is_one_digest,
        full_blocks_alone_have_keys,
        a_key_stands_for_all_before_it,
        the_root_enters_first,
        keys_are_exact,
    ],
    mistakes=[
        Mistake("four bytes a token", "one_block_is_one_digest", edit=("to_bytes(8,", "to_bytes(4,")),
        Mistake("big-endian", "one_block_is_one_digest", edit=('"little"', '"big"')),
        Mistake(
            "a key for the rest",
            "full_blocks_alone_have_keys",
            edit=("range(0, len(token_ids) - block_size + 1, block_size)", "range(0, len(token_ids), block_size)"),
        ),
        Mistake(
            "last full block lost",
            "one_block_is_one_digest",
            edit=("len(token_ids) - block_size + 1", "len(token_ids) - block_size"),
        ),
        Mistake("the block alone", "a_key_stands_for_all_before_it", edit=("sha256(parent + data)", "sha256(data)")),
        Mistake(
            "chained to the root",
            "a_key_stands_for_all_before_it",
            edit=(
                "        parent = hashlib.sha256(parent + data).digest()\n        keys.append(parent)",
                "        keys.append(hashlib.sha256(root + data).digest())",
            ),
        ),
        Mistake("no root", "the_root_enters_first", edit=("keys, parent = [], root", 'keys, parent = [], b""')),
        Mistake("tokens before the key", "keys_are_exact", edit=("sha256(parent + data)", "sha256(data + parent)")),
        Mistake(
            "hexadecimal parent",
            "keys_are_exact",
            edit=("sha256(parent + data)", "sha256((parent.hex().encode() if keys else parent) + data)"),
        ),
        Mistake(
            "Python's hash",
            "one_block_is_one_digest",
            edit=("hashlib.sha256(parent + data).digest()", "hash(parent + data).to_bytes(8, 'little', signed=True)"),
        ),
    ],
    forbids=("minillm.prefix_cache",),
)


# --- longest_match


def ids_of(longest_match, judge: Judge, known: list[bool], num_tokens: int, size: int) -> list[int]:
    """`known` says which of the full blocks are cached; block i has the id 40 - i."""
    keys = [bytes([i]) * 4 for i in range(num_tokens // size)]
    cached = {key: 40 - i for i, (key, yes) in enumerate(zip(keys, known)) if yes}
    got = longest_match(keys, cached, num_tokens, size)
    judge.type(got, list)
    return got


def matched(known: list[bool], num_tokens: int, size: int) -> list[int]:
    """Counting down from the longest that leaves a token."""
    most = max(count for count in range(num_tokens // size + 1) if count * size < num_tokens)
    return next([40 - i for i in range(count)] for count in range(most, -1, -1) if all(known[:count]))


def takes_the_blocks_in_order(longest_match, judge: Judge) -> None:
    judge.equal(
        ids_of(longest_match, judge, [True] * 3, 15, 4),
        [40, 39, 38],
        "for 15 tokens in blocks of 4, three of them cached. Likely mistake: keys or counts where block ids are asked.",
    )


def stops_at_the_first_miss(longest_match, judge: Judge) -> None:
    hint = "Likely mistake: later blocks are taken over though one before them is missing; what they hold is right, "
    hint += "but the tokens between would never be computed."
    for known in ([True, False, True], [False, True, True], [False, False, False]):
        judge.equal(ids_of(longest_match, judge, known, 15, 4), matched(known, 15, 4), hint)


def one_token_is_left(longest_match, judge: Judge) -> None:
    for num_tokens, size in ((8, 4), (4, 4), (12, 4), (1, 1)):
        judge.equal(
            ids_of(longest_match, judge, [True] * (num_tokens // size), num_tokens, size),
            matched([True] * (num_tokens // size), num_tokens, size),
            f"for {num_tokens} tokens in blocks of {size}, all cached. Likely mistake: the last token is taken from "
            "the cache too, and then there are no logits.",
        )


def shorter_than_a_block(longest_match, judge: Judge) -> None:
    judge.equal(ids_of(longest_match, judge, [], 3, 4), [], "3 tokens in blocks of 4: no full block, so no keys.")


def no_block_is_given_away(longest_match, judge: Judge) -> None:
    for num_tokens, size in ((5, 4), (9, 4), (11, 4), (13, 4), (3, 1)):
        full = num_tokens // size
        judge.equal(
            ids_of(longest_match, judge, [True] * full, num_tokens, size),
            matched([True] * full, num_tokens, size),
            f"for {num_tokens} tokens in blocks of {size}, {full} full blocks cached. Likely mistake: a whole block is "
            "computed again where one token was enough.",
        )


def block_zero_is_a_block(longest_match, judge: Judge) -> None:
    judge.equal(
        longest_match([b"a", b"b"], {b"a": 0, b"b": 5}, 9, 4),
        [0, 5],
        "Block id 0 is as good as any. Likely mistake: `if cached.get(key)` takes 0 for a miss.",
    )


MATCH = Exercise(
    name="longest_match",
    title="The longest match",
    chapter="11",
    difficulty=2,
    minutes=15,
    checks=[
        takes_the_blocks_in_order,
        stops_at_the_first_miss,
        one_token_is_left,
        shorter_than_a_block,
        no_block_is_given_away,
        block_zero_is_a_block,
    ],
    mistakes=[
        Mistake("keys for ids", "takes_the_blocks_in_order", edit=("append(cached[key])", "append(key)")),
        Mistake("skips the hole", "stops_at_the_first_miss", edit=("break", "continue")),
        Mistake(
            "the last token too",
            "one_token_is_left",
            edit=("(num_tokens - 1) // block_size", "num_tokens // block_size"),
        ),
        Mistake(
            "always one block fewer",
            "takes_the_blocks_in_order",
            edit=("(num_tokens - 1) // block_size", "max(0, num_tokens // block_size - 1)"),
        ),
        Mistake(
            "two tokens left",
            "no_block_is_given_away",
            edit=("(num_tokens - 1) // block_size", "(num_tokens - 2) // block_size if num_tokens > 1 else 0"),
        ),
        Mistake(
            "looks at the first key",
            "shorter_than_a_block",
            edit=("    found = []\n", "    found = []\n    if keys[0] not in cached:\n        return found\n"),
        ),
        Mistake("zero is a miss", "block_zero_is_a_block", edit=("if key not in cached:", "if not cached.get(key):")),
    ],
    forbids=("minillm.prefix_cache", "minillm.batching"),
)


# --- eviction_order


def by_last_use(released: list[list[int]]) -> list[int]:
    """Sorted by the last request that held it, then from the end of that request's table."""
    last = {block: (when, -place) for when, table in enumerate(released) for place, block in enumerate(table)}
    return sorted(last, key=last.get)


def order_of(eviction_order, judge: Judge, released: list[list[int]]) -> list[int]:
    got = eviction_order(released)
    judge.type(got, list)
    return got


def tail_first(eviction_order, judge: Judge) -> None:
    judge.equal(
        order_of(eviction_order, judge, [[5, 2, 9]]),
        [9, 2, 5],
        "One request with blocks 5, 2, 9. Likely mistake: the head goes first, and then its tail can never be found "
        "again; or the order is that of the numbers.",
    )


def the_older_request_first(eviction_order, judge: Judge) -> None:
    judge.equal(
        order_of(eviction_order, judge, [[1, 2], [3, 4], [5]]),
        [2, 1, 4, 3, 5],
        "Three requests with nothing in common. Likely mistake: the request that ended last is given up first.",
    )


def a_later_use_counts(eviction_order, judge: Judge) -> None:
    for released in ([[1, 2, 3], [1, 4]], [[1, 2], [3], [1, 2]], [[7], [8], [7], [9], [8]]):
        judge.equal(
            order_of(eviction_order, judge, released),
            by_last_use(released),
            f"for {released}. Likely mistake: a block counts from its first use, or is listed twice.",
        )


def no_head_before_its_tail(eviction_order, judge: Judge) -> None:
    """Chats that grow out of each other, as a tree: whatever is given up first, what is left can be reached."""
    rng = random.Random(3)
    for _ in range(20):
        paths, fresh, released = [[0]], iter(range(1, 100)), []
        for _ in range(6):
            stem = rng.choice(paths)
            paths.append(stem[: rng.randint(1, len(stem))] + [next(fresh) for _ in range(rng.randint(0, 3))])
            released.append(paths[-1])
        order = order_of(eviction_order, judge, released)
        judge.equal(sorted(order), sorted({b for table in released for b in table}), "Blocks are missing or made up.")
        judge.equal(order, by_last_use(released), f"for {released}. A head was given up before what hangs on it.")


ORDER = Exercise(
    name="eviction_order",
    title="Tails before heads",
    chapter="11",
    difficulty=3,
    minutes=20,
    checks=[tail_first, the_older_request_first, a_later_use_counts, no_head_before_its_tail],
    mistakes=[
        Mistake("heads first", "tail_first", edit=("in reversed(table)", "in table")),
        Mistake("by number", "tail_first", edit=("return list(order)", "return sorted(order)")),
        Mistake("newest request first", "the_older_request_first", edit=("in released:", "in reversed(released):")),
        Mistake("first use counts", "a_later_use_counts", edit=("            order.pop(block, None)\n", "")),
        Mistake(
            "listed twice",
            "a_later_use_counts",
            source="def eviction_order(released):\n    return [b for table in released for b in reversed(table)]\n",
        ),
        Mistake(
            "all turned round",
            "the_older_request_first",
            source=(
                "def eviction_order(released):\n    return list(dict.fromkeys(b for t in released for b in t))[::-1]\n"
            ),
        ),
        Mistake(
            "shared blocks last of all",
            "a_later_use_counts",
            source=(
                "def eviction_order(released):\n"
                "    count, order = {}, {}\n"
                "    for table in released:\n"
                "        for block in reversed(table):\n"
                "            count[block] = count.get(block, 0) + 1\n"
                "            order.pop(block, None)\n"
                "            order[block] = None\n"
                "    return sorted(order, key=lambda block: count[block] > 1)\n"
            ),
        ),
    ],
    forbids=("minillm.block_pool",),
)

EXERCISES = [KEYS, MATCH, ORDER, RELOAD]
