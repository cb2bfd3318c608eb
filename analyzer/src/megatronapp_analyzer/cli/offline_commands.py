"""The commands of recorded traces: `megatronapp trace import`, `scan analyze` and `aggregate`.

Heavy modules are imported when a command runs.
"""

import argparse
import pathlib

from megatronapp_common.cli import write_trace_file

_READ = """Read are the files of MegatronApp's ranks (benchmark-data-D-pipeline-P-tensor-T.json), the file of its
aggregator, traces of PyTorch's profiler (a file of each rank), and Chrome JSON of `megatronapp trace export`."""


def register_import(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `import` to the commands of `trace`."""
    importing = commands.add_parser(
        "import",
        help="turn traces of other tools into those of a hub",
        description=f"Write recorded traces of a job as a hub stores them, for `megatronapp scan analyze`.\n\n{_READ}",
    )
    importing.add_argument("source", metavar="PATH", type=pathlib.Path, nargs="+", help="file, or folder with files")
    importing.add_argument(
        "-o", "--output", metavar="FOLDER", type=pathlib.Path, required=True, help="new or empty folder to write"
    )
    importing.set_defaults(func=run_import)


def register_archive(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `archive` to the commands of `trace`."""
    archive = commands.add_parser(
        "archive",
        help="bring all traces of an ended job into Parquet files",
        description="Move the traces that the hub of a job had no time to archive before it ended to the job's archive "
        "of Parquet files, for pandas, polars and duckdb (docs/trace-store.md). A running hub does this by itself.",
    )
    archive.add_argument("job", metavar="JOB", help="name of the job")
    archive.set_defaults(func=run_archive)


def run_archive(arguments: argparse.Namespace) -> int:
    """Archive the traces of an ended job."""
    from megatronapp_analyzer.cli import fetch
    from megatronapp_analyzer.errors import ExportError
    from megatronapp_analyzer.offline.stored import archive_traces

    folder = fetch.job_folder(arguments.job)
    if fetch.has_hub(folder):
        raise ExportError(f"the hub of {arguments.job} is running and archives by itself; wait until it has ended")
    catalog = archive_traces(folder)
    files = catalog.files()
    print(f"{catalog.folder}: {sum(file.records for file in files)} records in {len(files)} files")
    return 0


def register_scan(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `scan` with its subcommand."""
    scan = subparsers.add_parser("scan", help="find slow ranks in recorded traces", description="MegaScan offline.")
    commands = scan.add_subparsers(dest="scan_command", metavar="COMMAND", required=True)
    analyze = commands.add_parser(
        "analyze",
        help="print what the detector finds in recorded steps",
        description="Let the detector of a hub judge recorded steps, and print its verdicts with cause and cost. PATH "
        "is the folder of a job or of its stored traces, the output of `megatronapp trace import`, or what that "
        f"command reads.\n\n{_READ}",
    )
    analyze.add_argument("path", metavar="PATH", type=pathlib.Path, help="folder or file with traces")
    analyze.add_argument("--json", action="store_true", help="print one JSON object with the verdicts")
    analyze.set_defaults(func=run_analyze)


def register_aggregate(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `aggregate`, with the options of MegatronApp's script in all spellings that its pages print."""
    aggregate = subparsers.add_parser(
        "aggregate",
        help="join the traces of MegatronApp's ranks in one file",
        description="Write recorded traces of all ranks of a job as one trace for Perfetto and chrome://tracing, with "
        f"arrows from sends to receives.\n\n{_READ}",
    )
    aggregate.add_argument(
        "-b",
        "--b",
        "--benchmark",
        "--bench-dir",
        "--benchmark_dir",
        dest="source",
        metavar="FOLDER",
        type=pathlib.Path,
        default=pathlib.Path(),
        help="folder with the files of all ranks, or of stored traces (default: this one)",
    )
    aggregate.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=pathlib.Path,
        default=pathlib.Path("benchmark.json"),
        help="file to write, Perfetto's protobuf if it ends in .pftrace (default: %(default)s)",
    )
    aggregate.add_argument("-d", "--detect", action="store_true", help="also print what is slow, as scan analyze does")
    aggregate.set_defaults(func=run_aggregate)


def run_import(arguments: argparse.Namespace) -> int:
    """Read traces and write them as a hub stores them."""
    from megatronapp_analyzer.offline.read import read_traces
    from megatronapp_analyzer.offline.stored import write_traces

    job = read_traces(arguments.source)
    write_traces(job, arguments.output)
    records = sum(len(rank.records) for rank in job.ranks)
    print(f"{arguments.output}: {records} records of {len(job.ranks)} ranks; megatronapp scan analyze reads them")
    for note in job.notes:
        print(f"  note: {note}")
    return 0


def run_analyze(arguments: argparse.Namespace) -> int:
    """Judge recorded steps and print the verdicts."""
    import json

    from megatronapp_analyzer.offline.analyze import analyze_path, text_lines

    found = analyze_path(arguments.path)
    print(json.dumps(found.document(), indent=1) if arguments.json else "\n".join(text_lines(found)))
    return 0


def run_aggregate(arguments: argparse.Namespace) -> int:
    """Join the files of ranks in one trace, and judge them if asked."""
    from megatronapp_analyzer.hub.export.formats import TraceFormat, summary, trace_file
    from megatronapp_analyzer.hub.export.tracks import source_of
    from megatronapp_analyzer.offline.analyze import analyze, open_traces, text_lines

    ingest, notes = open_traces(arguments.source, except_for=arguments.output)
    form = TraceFormat.of_file(arguments.output)
    content = trace_file(source_of(ingest, "imported", ingest.store.select(0, None, newest=0)), form)
    write_trace_file(arguments.output, content)
    print(f"{arguments.output}: {summary(content, form)}; open it at https://ui.perfetto.dev")
    if arguments.detect:
        print("\n".join(text_lines(analyze(ingest, source=str(arguments.source), notes=notes))))
    else:
        for note in notes:
            print(f"  note: {note}")
    return 0
