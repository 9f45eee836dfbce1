"""`sparkctl inspect`: what a model file holds, without a daemon."""

from __future__ import annotations

import argparse
import dataclasses

from sparkctl.plain import printable, write_json
from sparkd.gguf.inspect import LayerReport, Report, inspect
from sparkd.gguf.model_file import ModelFile


def run(args: argparse.Namespace) -> int:
    """Print the report of a file."""
    report = inspect(ModelFile.open(args.file))
    if args.json:
        write_json(dataclasses.asdict(report))
    else:
        _show(report, layers=args.layers)
    return 0


def _show(report: Report, *, layers: bool) -> None:
    from rich.text import Text

    from sparkctl.tables import amount, bar, console, facts, size, table

    out = console()
    out.print(facts(_facts(report)))

    formats = table("type", "tensors>", "weights>", "bytes>", "share", title="Types")
    for row in report.formats:
        name = row.name if row.computable else f"{row.name} (not supported yet)"
        share = bar(row.bytes / max(report.tensor_bytes, 1))
        formats.add_row(name, str(row.tensors), amount(row.weights), size(row.bytes), share)
    out.print(formats)

    shapes = table("tensor", "shape", "type", "tensors>", "bytes>", title="Tensors")
    for shape in report.shapes:
        dimensions = " × ".join(map(str, shape.shape))
        shapes.add_row(Text(printable(shape.name)), dimensions, shape.format, str(shape.tensors), size(shape.bytes))
    out.print(shapes)

    if report.records:
        records = table("record>", "blocks>", "experts>", "bytes>", title="Experts")
        for record in report.records:
            total = record.records * record.bytes
            records.add_row(f"{record.bytes:,} B", str(record.layers), str(record.records), size(total))
        out.print(records)
    if layers:
        blocks = table("block>", "kind", "gate", "up", "down", "record>", title="Blocks")
        for layer in report.layers:
            record_bytes = f"{layer.record_bytes:,} B" if layer.record_bytes else ""
            blocks.add_row(
                str(layer.index), _kind(layer), layer.gate or "", layer.up or "", layer.down or "", record_bytes
            )
        out.print(blocks)
    if len(report.files) > 1:
        files = table("file", "tensors>", "bytes>", title="Files")
        for file in report.files:
            files.add_row(Text(printable(file.name)), str(file.tensors), size(file.bytes))
        out.print(files)
    for note in report.notes:
        out.print(Text(f"note: {printable(note)}"), soft_wrap=True)


def _facts(report: Report) -> list[tuple[str, str]]:
    from sparkctl.tables import amount, size

    blocks = "" if report.blocks is None else str(report.blocks)
    if report.draft_blocks:
        blocks += f", {report.draft_blocks} of them for next-token prediction (skipped)"
    experts = f"{report.experts}, {report.experts_used} used for a token" if report.experts else "none"
    rows = [
        ("file", report.path),
        ("name", report.name),
        ("architecture", report.architecture),
        ("file type", report.label),
        ("GGUF version", report.version),
        ("parameters", amount(report.parameters)),
        ("size", f"{size(report.file_bytes)}, tensors {size(report.tensor_bytes)}"),
        ("blocks", blocks),
        ("width", report.width),
        ("context", report.context),
        ("vocabulary", f"{report.tokens} tokens" if report.tokens is not None else None),
        ("experts", experts),
        ("output head", "tied to the embeddings" if report.tied_head else "its own"),
        ("fingerprint", report.fingerprint),
    ]
    return [(name, str(value)) for name, value in rows if value not in (None, "")]


def _kind(layer: LayerReport) -> str:
    kind = f"{layer.experts} experts" if layer.experts else "dense"
    return kind + (", gate and up fused" if layer.fused else "") + (", draft" if layer.draft else "")
