"""`statebackend ui`: the page of jobs that do not run, or not on this host."""

from __future__ import annotations

import os
from threading import Event
from typing import Annotated

import typer
from rich.markup import escape

from statebackend import system
from statebackend.cli.console_output import console, guarded
from statebackend.cli.job_folders import place_of

__all__ = ["serve_page"]


@guarded
def serve_page(
    uri: Annotated[str, typer.Argument(help="The folder of all jobs: the uri= of the query.")],
    port: Annotated[int, typer.Option("--port", help="0 for any that is free.")] = 0,
    host: Annotated[
        str, typer.Option("--host", help="Any other than this host's own needs a token.")
    ] = "127.0.0.1",
    token: Annotated[
        str,
        typer.Option(
            "--token",
            help="What a browser must know. [env: STATEBACKEND_UI_TOKEN]",
            hide_input=True,
        ),
    ] = "",
    s3_endpoint: Annotated[
        str,
        typer.Option("--s3-endpoint", help="URL of an S3 server. [env: STATEBACKEND_S3_ENDPOINT]"),
    ] = "",
    s3_region: Annotated[
        str, typer.Option("--s3-region", help="Region of the bucket. [env: STATEBACKEND_S3_REGION]")
    ] = "",
) -> None:
    """Serve the page of the jobs under a URI, until Ctrl-C. It reads only, and claims nothing."""
    place = place_of(uri, s3_endpoint, s3_region)
    place.listed()  # what is wrong with the URI is said here
    from statebackend.ui.driver_page import check_installed  # imports PySpark

    check_installed()
    from statebackend.ui.job_pages import JobSite
    from statebackend.ui.page_server import PageServer
    from statebackend.ui.stored_job_view import StoredJobs

    token = token or os.environ.get("STATEBACKEND_UI_TOKEN", "")
    site = JobSite(StoredJobs(uri, place.options), system.wall_ms)
    server = PageServer(site, host=host, port=port, token=token)
    out = console()
    out.print(f"The jobs under {escape(uri)} are shown at {server.url}")
    if token:
        out.print("Open it once with ?token=... at the end of its address.")
    try:
        Event().wait()
    except KeyboardInterrupt:
        server.stop()
