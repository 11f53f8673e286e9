"""The values of `bench`, for a person."""

from __future__ import annotations

from typing import Any

from .common import print_rows, size_text


def print_table(v: dict[str, Any]) -> None:
    """Prints what `bench --json` prints as blocks of aligned rows."""
    print(f"{v['model']} on {v['device']}, {v['threads']} threads, torch {v['torch']}, {v['date'][:10]}")
    print(f"weights {v['layout']} (--dtype {v['dtype']}); medians of {v['rounds']} rounds\n")
    ms, weights = v["decode_ms"], size_text(v["weight_bytes_held"])
    print_rows(
        "Speed",
        [
            ("decode, batch 1", f"{v['decode_tok_s']:.1f} tok/s",
             f"{ms['median']:.2f} ms a step, {ms['p10']:.2f} to {ms['p90']:.2f} (10 to 90%)"),
            ("prefill", f"{v['prefill_tok_s']:.0f} tok/s", f"{v['prefill_tokens']} tokens in {v['prefill_ms']:.0f} ms"),
            _many_row(v),
            ("load", f"{v['load_s']:.2f} s", f"choosing the layout apart: {v['layout_measurement_s']:.2f} s"),
            ("peak memory", f"{v['peak_rss_mb']:.0f} MB", f"of the process; its weights, once loaded: {weights}"),
        ],
    )  # fmt: skip
    print_rows(
        "Bound of decoding",
        [
            ("read bandwidth", f"{v['read_bandwidth_gb_s']:.1f} GB/s", "measured in this run"),
            (
                "bytes read a step",
                size_text(v["bytes_per_step"]),
                f"KV cache {size_text(v['kv_bytes_per_step'])} of it",
            ),
            ("so at least", f"{v['decode_bound_ms']:.2f} ms", "bytes / bandwidth"),
            ("fraction reached", f"{v['decode_fraction_of_roofline']:.0%}", "bound / measured"),
        ],
    )
    if v["decode_fraction_of_roofline"] > 1:
        print("  (above 100%: the machine was busy while its bandwidth was measured, or weights stayed in its cache)\n")
    if "experts" in v:
        e = v["experts"]
        copied = f"{e['hits']:,} uses found, {e['misses']:,} copied: {size_text(e['copied_bytes'])}, all of this run"
        print_rows("Experts in host memory", [("found on the device", f"{e['hit_rate']:.0%}", copied)])
    if "transformers" in v:
        _print_comparison(v, v["transformers"])
    if "speculation" in v:
        _print_speculation(v["speculation"])
    if "quality" in v:
        _print_quality(v["quality"])


def _many_row(v: dict[str, Any]) -> tuple[str, str, str]:
    w = v["workload"]
    return (
        f"{w['requests']} requests at once",
        f"{v['throughput_tok_s']:.0f} tok/s",
        f"{w['output_tokens']} tokens out, {w['prompt_tokens']} in; {v['kv_waste']:.1%} of the cache's blocks unused, "
        f"{v['kv_waste_reserved']:.1%} had each reserved the maximum",
    )


def _print_comparison(v: dict[str, Any], theirs: dict[str, Any]) -> None:
    faster = {
        name: f"minillm is {theirs[f'{name}_speedup']:.2f} times as fast"
        for name in ("decode", "prefill", "throughput")
    }
    print_rows(
        f"Against transformers {theirs['version']}, {theirs['dtype']}, in turns",
        [
            ("decode", f"{theirs['decode_tok_s']:.1f} tok/s", faster["decode"]),
            ("prefill", f"{theirs['prefill_tok_s']:.0f} tok/s", faster["prefill"]),
            (f"{v['workload']['requests']} requests", f"{theirs['throughput_tok_s']:.0f} tok/s",
             f"in static batches of {theirs['static_batch']}; {faster['throughput']}"),
            ("static in our engine", f"{v['throughput_static']['static_tok_s']:.0f} tok/s",
             f"batches of {theirs['static_batch']}; continuous is "
             f"{v['throughput_tok_s'] / v['throughput_static']['static_tok_s']:.2f} times as fast"),
            ("tokens in common", f"{theirs['same_tokens']} of {v['output_tokens'] + 1}", "to the first difference"),
        ],
    )  # fmt: skip


def _print_speculation(s: dict[str, Any]) -> None:
    rows = []
    for task, what in (("copy", "a passage that stands in the prompt"), ("text", "free text")):
        t, drafts = s[task], "nothing was drafted"
        if t["acceptance"] is not None:
            drafts = f"{t['acceptance']:.0%} of drafts kept, {t['tokens_per_step']:.2f} tokens a step with drafts"
        rows.append((task, f"{t['speedup']:.2f} times", f"{what}: {t['tok_s']:.1f} tok/s; {drafts}"))
    for b in s.get("batches", ()):
        both = f"{s['num_tokens']} drafts always: {b['fixed_tok_s']:.0f} tok/s, without: {b['plain_tok_s']:.0f}"
        rows.append((f"{b['sequences']} at once, text", f"{b['adaptive_tok_s'] / b['plain_tok_s']:.2f} times", both))
    print_rows(f"Speculation, {s['method']}, up to {s['num_tokens']} drafts, against none, in turns", rows)


def _print_quality(q: dict[str, Any]) -> None:
    print_rows(
        f"Against float32, {q['tokens']} tokens of {q['text']}, sha256 {q['sha256'][:8]}",
        [
            ("KL divergence", f"{q['kl_to_float32']:.2e}", "nats a token"),
            ("same first choice", f"{q['top1_agreement']:.1%}", ""),
            ("loss", f"{q['loss']:.4f}", f"nats a token; float32 {q['loss_float32']:.4f}"),
        ],
    )
