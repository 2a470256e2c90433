"""Pages of `aligner view` by URL path. All pages are read-only, except for the notes of a run."""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any
from urllib.parse import parse_qs, urlencode

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    RedirectResponse,
    Response,
)
from starlette.routing import Route

from aligner.errors import AlignerError
from aligner.file_limits import parse_json
from aligner.observability.trace import read_spans
from aligner.view.figures import (
    Plot,
    PlottedRun,
    build_curves,
    build_metric_plots,
    build_run_plots,
    build_timeline_plots,
    list_run_plot_metrics,
)
from aligner.view.metric_descriptions import name_metric
from aligner.view.prompt_turns import build_prompt_turns, build_sample_turns
from aligner.view.rendering import STATIC, find_plotly_script, render, summarize_configuration
from aligner.view.run_index import (
    UNREADABLE,
    Overview,
    RunIndex,
    ViewedRun,
    assign_colors,
    compare_configurations,
    compute_key_figures,
    count_failures,
    file_stamp,
)
from aligner.view.run_logs import find_log_problems, list_log_files, read_log_end
from aligner.view.run_notes import parse_notes, write_notes
from aligner.view.sample_table import PAGE_SIZE, ListPosition, Row, SampleFilter, SampleTable
from aligner.view.shown_text import printable, token_columns
from aligner.view.text_diff import Part, compare_words

_RUN_SORTS = ("name", "state", "step", "reward", "seconds_per_step", "started")
_SAMPLE_SORT_NAMES = {
    "-step": "newest",
    "step": "oldest",
    "-score": "highest score",
    "score": "lowest score",
    "-advantage": "largest advantage",
    "advantage": "smallest advantage",
    "-response_tokens": "longest response",
    "response_tokens": "shortest response",
}
_PROMPT_SORT_NAMES = {
    "-last_step": "newest",
    "-mean": "highest mean score",
    "mean": "lowest mean score",
    "-spread": "largest standard deviation",
    "spread": "smallest standard deviation",
    "-samples": "most samples",
}
# Parameters of the list of samples that the links to its samples contain.
_FILTER_NAMES = ("q", "least", "most", "first", "last", "shortest", "longest", "end")
# Values of the parameter `end`, and whether it selects truncated responses.
_ENDS = {"complete": False, "truncated": True}
_MAX_COMPARED = 8
# Maximum number of runs whose curves the list of runs shows.
_MAX_PLOTTED_RUNS = 50
_MAX_LOG_PROBLEMS = 50
# Maximum size of a form, in bytes.
_MAX_FORM_BYTES = 200_000
_Handler = Callable[["Pages", Request], Response]


def _pass_run(page: Callable[["Pages", Request, ViewedRun], Response]) -> _Handler:
    """Return a handler that passes the run of the path's `key` to a page."""

    @wraps(page)
    def handle(self: "Pages", request: Request) -> Response:
        return page(self, request, self._find_run(request.path_params["key"]))

    return handle


class Pages:
    """Handlers of the server's paths; each takes a request and returns a response."""

    def __init__(self, index: RunIndex) -> None:
        self._index = index

    def routes(self) -> list[Route]:
        """Return the routes for Starlette, which calls synchronous handlers in threads."""
        sample = "/runs/{key}/samples/{step:int}/{row:int}"
        pages: dict[str, Callable[[Request], Response]] = {
            "/": self.run_list,
            "/curves.json": self.run_curves,
            "/compare": self.compare,
            "/compare/curves.json": self.compared_curves,
            "/static/plotly.min.js": lambda request: FileResponse(find_plotly_script()),
            "/static/{name}": self.static,
            "/runs/{key}": self.overview,
            "/runs/{key}/state": self.state,
            "/runs/{key}/curves.json": self.curves,
            "/runs/{key}/timeline": self.timeline,
            "/runs/{key}/timeline.json": self.timeline_data,
            "/runs/{key}/configuration": self.configuration,
            "/runs/{key}/logs": self.logs,
            "/runs/{key}/health": self.health,
            "/runs/{key}/samples": self.samples,
            sample: self.sample,
            f"{sample}/sample.json": self.sample_data,
            f"{sample}/tokens.json": self.tokens,
            f"{sample}/group": self.group,
            f"{sample}/over-time": self.over_time,
            f"{sample}/scores.json": self.scores,
        }
        return [
            *(Route(path, page, methods=["GET"]) for path, page in pages.items()),
            Route("/runs/{key}/notes", self.save_notes, methods=["POST"]),
        ]

    def run_list(self, request: Request) -> Response:
        """Return the page that lists all runs, filtered and sorted by the query."""
        query = _read_run_query(request.query_params)
        all_runs = self._index.runs()
        runs = _select_runs(all_runs, query)
        names = {name for run in _select_plotted_runs(runs) for name in run.curves([]).names}
        return _render_page(
            "runs.html",
            directories=[str(directory) for directory in self._index.directories],
            runs=[run.overview() for run in runs],
            total=len(all_runs),
            states=sorted({run.overview().state for run in all_runs}),
            query=query,
            link=_link_builder(query),
            colors=assign_colors(all_runs),
            metrics=_group_metrics(names),
            source=f"/curves.json?{_link_builder(query)()}",
            has_plots=True,
        )

    def run_curves(self, request: Request) -> Response:
        """Return the plots with the curves of the listed runs, as JSON; status 304 if they have not
        changed."""
        query = _read_run_query(request.query_params)
        all_runs = self._index.runs()
        runs = _select_runs(all_runs, query)
        plotted = _select_plotted_runs(runs)
        stamps = tuple((run.key, file_stamp(run.paths.metrics)) for run in plotted)
        etag = f'"{hash((stamps, len(runs))):x}"'
        if request.headers.get("if-none-match", "").removeprefix("W/") == etag:
            return Response(status_code=304)
        metrics = list_run_plot_metrics(query["metric"])
        colors = assign_colors(all_runs)
        note = f"first {len(plotted)} runs" if len(runs) > _MAX_PLOTTED_RUNS else ""
        plots = build_run_plots(
            [
                PlottedRun(
                    run.key, run.overview().name, colors[run.key], run.curves(metrics).curves
                )
                for run in plotted
            ],
            query["metric"],
            note,
        )
        response = _plots_response(list(plots))
        response.headers["etag"] = etag
        return response

    def compare(self, request: Request) -> Response:
        """Return the page that compares several runs."""
        runs = self._compared_runs(request)
        overviews = [run.overview() for run in runs.values()]
        try:
            rows = compare_configurations({name: run.config() for name, run in runs.items()})
            problem = ""
        except AlignerError as error:  # the configuration of another version of aligner
            rows = []
            problem = str(error)
        source = "/compare/curves.json?" + urlencode([("run", run.key) for run in runs.values()])
        return _render_page(
            "compare.html",
            runs=overviews,
            names=list(runs),
            rows=rows,
            problem=problem,
            source=source,
            has_plots=True,
        )

    def compared_curves(self, request: Request) -> Response:
        """Return the plots with the curves of the compared runs, as JSON."""
        runs = self._compared_runs(request)
        metrics_by_run = {name: run.metrics() for name, run in runs.items()}
        colors_by_key = assign_colors(self._index.runs())
        colors = {name: colors_by_key[run.key] for name, run in runs.items()}
        return _plots_response(list(build_curves(metrics_by_run, colors)))

    def static(self, request: Request) -> Response:
        """Return a style sheet, script or icon of the pages."""
        file = STATIC / request.path_params["name"]
        if file not in list(STATIC.iterdir()):
            raise HTTPException(404, "No such file.")
        return FileResponse(file)

    @_pass_run
    def overview(self, request: Request, run: ViewedRun) -> Response:
        """Return the page with a run's key figures and curves."""
        figures = compute_key_figures(run.metrics())
        return self._render_run_page(
            "run.html",
            run,
            "Curves",
            figures=figures,
            source=f"/runs/{run.key}/curves.json",
            has_plots=True,
        )

    @_pass_run
    def state(self, request: Request, run: ViewedRun) -> Response:
        """Return the header of a run's pages, which contains its state."""
        return _render_page("state.html", run=run.overview())

    @_pass_run
    def curves(self, request: Request, run: ViewedRun) -> Response:
        """Return the plots of a run's metrics, as JSON; status 304 if they have not changed."""
        etag = f'"{hash(file_stamp(run.paths.metrics)):x}"'
        # Clients may send the entity tag as a weak one, with the prefix W/.
        if request.headers.get("if-none-match", "").removeprefix("W/") == etag:
            return Response(status_code=304)
        response = _plots_response(list(build_metric_plots(run.metrics())))
        response.headers["etag"] = etag
        return response

    @_pass_run
    def timeline(self, request: Request, run: ViewedRun) -> Response:
        """Return the page with the timeline of a run's processes."""
        return self._render_run_page(
            "timeline.html",
            run,
            "Timeline",
            source=f"/runs/{run.key}/timeline.json",
            has_plots=True,
        )

    @_pass_run
    def timeline_data(self, request: Request, run: ViewedRun) -> Response:
        """Return the plots of the timeline, as JSON."""
        return _plots_response(list(build_timeline_plots(read_spans(run.paths))))

    @_pass_run
    def configuration(self, request: Request, run: ViewedRun) -> Response:
        """Return the page with a run's configuration."""
        others = [other.overview() for other in self._index.runs() if other is not run]
        return self._render_run_page(
            "configuration.html",
            run,
            "Configuration",
            summary=summarize_configuration(run.config()),
            others=others,
        )

    @_pass_run
    def logs(self, request: Request, run: ViewedRun) -> Response:
        """Return the page with the last part of a process's log."""
        files = list_log_files(run.paths.logs)
        name = request.query_params.get("file", files[0].name if files else "")
        file = next((log_file for log_file in files if log_file.name == name), None)
        if files and file is None:
            raise HTTPException(404, f"{name}: this run has no such log")
        lines, skipped_bytes = read_log_end(file) if file is not None else ([], 0)
        return self._render_run_page(
            "logs.html",
            run,
            "Logs",
            files=files,
            file=name,
            lines=lines,
            skipped_bytes=skipped_bytes,
        )

    async def save_notes(self, request: Request) -> Response:
        """Save the note and the tags of a form, and return a redirect to the run's page."""
        run = await run_in_threadpool(self._find_run, request.path_params["key"])
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MAX_FORM_BYTES:
                raise HTTPException(413, f"The form is larger than {_MAX_FORM_BYTES} bytes.")
        fields = parse_qs(body.decode(errors="replace"), keep_blank_values=True)
        try:
            notes = parse_notes(fields["note"][0], fields["tags"][0])
        except KeyError as error:
            raise HTTPException(400, f"The form lacks the field {error}.") from error
        except AlignerError as error:
            raise HTTPException(400, str(error)) from error
        await run_in_threadpool(write_notes, run.paths.notes, notes)
        return RedirectResponse(f"/runs/{run.key}", 303)

    @_pass_run
    def health(self, request: Request, run: ViewedRun) -> Response:
        """Return the page with the health of the roles, the failure counts, and the problems in the
        logs."""
        log_problems = find_log_problems(run.paths.logs)[:_MAX_LOG_PROBLEMS]
        return self._render_run_page(
            "health.html",
            run,
            "Health",
            status=run.status(),
            failure_counts=count_failures(run.metrics()),
            log_problems=log_problems,
        )

    @_pass_run
    def samples(self, request: Request, run: ViewedRun) -> Response:
        """Return a page of a run's samples or prompts, filtered and sorted by the query."""
        parameters = request.query_params
        query = {name: parameters.get(name, "") for name in (*_FILTER_NAMES, "by")}
        sorts = _PROMPT_SORT_NAMES if query["by"] else _SAMPLE_SORT_NAMES
        query["sort"] = _read_sort(parameters, sorts)
        page = int(_parse_number(parameters, "page") or 0)
        table = SampleTable(run.paths)
        rows, total = (table.prompts if query["by"] else table.page)(
            _read_filter(parameters), query["sort"], max(0, page)
        )
        return self._render_run_page(
            "samples.html",
            run,
            "Samples",
            rows=rows,
            total=total,
            query=query,
            sorts=sorts,
            page=page,
            size=PAGE_SIZE,
            has_all=table.has_all,
            is_filtered=any(query[name] for name in _FILTER_NAMES),
            link=_link_builder(query),
            list_query=_build_list_query(parameters),
        )

    @_pass_run
    def sample(self, request: Request, run: ViewedRun) -> Response:
        """Return the page of one sample."""
        table, sample = self._find_sample(request, run)
        group = table.group(sample["step"], sample["group"]) if sample["group"] is not None else []
        metadata = sample.get("metadata")
        parameters = request.query_params
        position = table.find_position(
            _read_filter(parameters),
            _read_sort(parameters, _SAMPLE_SORT_NAMES),
            sample["step"],
            sample["row"],
        )
        return self._render_run_page(
            "sample.html",
            run,
            "Samples",
            sample=sample,
            group=group,
            position=position or ListPosition(0, 0),
            list_page=position.number // PAGE_SIZE if position is not None else 0,
            list_query=_build_list_query(parameters),
            text=parameters.get("q", ""),
            turns=build_sample_turns(
                sample["prompt"] or "", sample["response"] or "", sample["messages"]
            ),
            metadata="" if metadata in (None, "", "{}") else printable(_indent_json(metadata)),
            has_tokens=table.tokens(sample["step"], sample["row"]) is not None,
            has_all=table.has_all,
        )

    @_pass_run
    def sample_data(self, request: Request, run: ViewedRun) -> Response:
        """Return all columns of one sample, as JSON with indentation."""
        _, sample = self._find_sample(request, run)
        for name in ("messages", "metadata"):
            sample[name] = _parse_json(sample.get(name))
        values = _replace_nonfinite({key: value for key, value in sample.items() if key != "row"})
        text = json.dumps(values, indent=2, ensure_ascii=False)
        # A lone surrogate of a stored text has no encoding.
        return Response(text.encode(errors="replace"), media_type="application/json")

    @_pass_run
    def group(self, request: Request, run: ViewedRun) -> Response:
        """Return the page that shows all samples of a prompt of one step beside each other."""
        table, sample = self._find_sample(request, run)
        group = [sample]
        if sample["group"] is not None:
            group = table.group(sample["step"], sample["group"])
        scores = [row["score"] for row in group if row["score"] is not None]
        are_different = bool(scores) and min(scores) < max(scores)
        return self._render_run_page(
            "group.html",
            run,
            "Samples",
            sample=sample,
            turns=build_prompt_turns(sample["prompt"] or "", sample["messages"]),
            group=group,
            best=max(scores) if are_different else None,
            worst=min(scores) if are_different else None,
        )

    @_pass_run
    def tokens(self, request: Request, run: ViewedRun) -> Response:
        """Return the recorded quantities of a response's tokens, as JSON."""
        step = request.path_params["step"]
        row = request.path_params["row"]
        tokens = SampleTable(run.paths).tokens(step, row)
        if tokens is None:
            raise HTTPException(404, f"The token data of step {step} is no longer stored.")
        return JSONResponse(_replace_nonfinite(token_columns(tokens)))

    @_pass_run
    def over_time(self, request: Request, run: ViewedRun) -> Response:
        """Return the page that compares the samples of a prompt at several steps."""
        table, sample = self._find_sample(request, run)
        texts = request.query_params.get("steps", "").replace(",", " ").split()
        means, by_step = table.over_time(
            sample["prompt"], [int(text) for text in texts if text.isdecimal()][:_MAX_COMPARED]
        )
        has_differences = bool(request.query_params.get("differences"))
        return self._render_run_page(
            "over_time.html",
            run,
            "Samples",
            turns=build_prompt_turns(sample["prompt"] or "", sample["messages"]),
            has_differences=has_differences,
            differences=_compare_steps(by_step) if has_differences else {},
            means={row["step"]: row for row in means},
            sampled_steps=[row["step"] for row in means],
            by_step=by_step,
            source=request.url.path.replace("over-time", "scores.json"),
            has_plots=True,
        )

    @_pass_run
    def scores(self, request: Request, run: ViewedRun) -> Response:
        """Return the plot of a prompt's mean score by step, as JSON."""
        table, sample = self._find_sample(request, run)
        means = [row for row in table.over_time(sample["prompt"], [])[0] if row["mean"] is not None]
        trace = {"type": "scatter", "mode": "lines+markers", "x": [row["step"] for row in means]}
        return _plots_response(
            [
                Plot(
                    "scores",
                    "Mean score of this prompt",
                    [{**trace, "y": [row["mean"] for row in means]}],
                    {},
                    wide=True,
                )
            ]
        )

    def _find_run(self, key: str) -> ViewedRun:
        """Return the run with a key. Raise HTTPException 404 if the run does not exist."""
        run = self._index.run(key)
        if run is None:
            raise HTTPException(404, "This run does not exist, or its directory was deleted.")
        return run

    def _compared_runs(self, request: Request) -> dict[str, ViewedRun]:
        """Return the runs of a comparison by name; runs with equal names get their directories as
        names."""
        runs = [self._find_run(key) for key in dict.fromkeys(request.query_params.getlist("run"))][
            :_MAX_COMPARED
        ]
        if len(runs) < 2:
            raise HTTPException(400, "Select at least two runs to compare.")
        names = [run.overview().name for run in runs]
        duplicates = {name for name in names if names.count(name) > 1}
        return {
            str(run.paths.root) if name in duplicates else name: run
            for name, run in zip(names, runs, strict=True)
        }

    def _find_sample(self, request: Request, run: ViewedRun) -> tuple[SampleTable, dict[str, Any]]:
        """Return the table of a run's samples, and the sample of the path. Raise HTTPException 404
        if the sample is missing."""
        table = SampleTable(run.paths)
        sample = table.sample(request.path_params["step"], request.path_params["row"])
        if sample is None:
            raise HTTPException(404, "This sample does not exist, or it is no longer stored.")
        return table, sample

    def _render_run_page(self, template: str, run: ViewedRun, tab: str, **values: Any) -> Response:
        return _render_page(template, run=run.overview(), tab=tab, **values)


def render_error(request: Request, error: Exception) -> Response:
    """Return the page that reports an error."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = error.detail if isinstance(error, HTTPException) else str(error)
    if not isinstance(error, HTTPException | AlignerError | OSError):
        message = f"{type(error).__name__}: {message}"
    title = {404: "Not found", 400: "Invalid request", 413: "Invalid request"}.get(
        status, "Cannot read the run"
    )
    return HTMLResponse(render("problem.html", title=title, message=message), status)


def _render_page(template: str, **values: Any) -> Response:
    return HTMLResponse(render(template, **values))


def _plots_response(plots: Sequence[Plot]) -> Response:
    return JSONResponse([plot.to_json() for plot in plots])


def _read_run_query(parameters: Mapping[str, str]) -> dict[str, str]:
    """Return the query of the list of runs. Raise HTTPException 400 if its order is unknown."""
    query = {name: parameters.get(name, "") for name in ("q", "state", "metric")}
    query["sort"] = parameters.get("sort", "-started")
    if query["sort"].removeprefix("-") not in _RUN_SORTS:
        raise HTTPException(
            400,
            f"sort={query['sort']}: must be one of {', '.join(_RUN_SORTS)}, optionally with the"
            " prefix -",
        )
    return query


def _select_runs(runs: Sequence[ViewedRun], query: Mapping[str, str]) -> list[ViewedRun]:
    """Return the runs that a query of the list selects, in the order of the list."""
    text = query["q"].lower()
    matches = [
        overview
        for overview in (run.overview() for run in runs)
        if query["state"] in ("", overview.state) and text in _join_searched_texts(overview)
    ]
    sort = query["sort"]
    ordered = _sort_runs(matches, sort.removeprefix("-"), sort.startswith("-"))
    runs_by_key = {run.key: run for run in runs}
    return [runs_by_key[overview.key] for overview in ordered]


def _select_plotted_runs(runs: Sequence[ViewedRun]) -> list[ViewedRun]:
    """Return the listed runs whose curves are plotted."""
    return [run for run in runs if run.overview().state != UNREADABLE][:_MAX_PLOTTED_RUNS]


def _group_metrics(names: Iterable[str]) -> dict[str, list[tuple[str, str]]]:
    """Return the names and the plain names of metrics by the first part of the names."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(filter(str.isprintable, names)):
        groups.setdefault(name.partition("/")[0], []).append((name, name_metric(name)))
    return groups


def _join_searched_texts(run: Overview) -> str:
    return " ".join([run.name, run.experiment, run.directory, *run.notes.tags]).lower()


def _read_filter(parameters: Mapping[str, str]) -> SampleFilter:
    """Return the selection of samples of a query."""
    first = _parse_number(parameters, "first")
    last = _parse_number(parameters, "last")
    return SampleFilter(
        parameters.get("q", ""),
        least=_parse_number(parameters, "least"),
        most=_parse_number(parameters, "most"),
        first=None if first is None else math.ceil(first),
        last=None if last is None else math.floor(last),
        shortest=_parse_number(parameters, "shortest"),
        longest=_parse_number(parameters, "longest"),
        is_truncated=_ENDS.get(parameters.get("end", "")),
    )


def _read_sort(parameters: Mapping[str, str], sorts: Mapping[str, str]) -> str:
    """Return the order of a query; the first of the orders if the query has no known order."""
    sort = parameters.get("sort", "")
    return sort if sort in sorts else next(iter(sorts))


def _build_list_query(parameters: Mapping[str, str]) -> str:
    """Return the query string with the filter and the order of a list of samples, for the links to
    its samples; empty for the default list."""
    query = {name: parameters.get(name, "") for name in _FILTER_NAMES}
    sort = _read_sort(parameters, _SAMPLE_SORT_NAMES)
    if sort != next(iter(_SAMPLE_SORT_NAMES)):
        query["sort"] = sort
    return urlencode({name: value for name, value in query.items() if value})


def _compare_steps(by_step: Mapping[int, Sequence[Row]]) -> dict[tuple[int, int], list[Part]]:
    """Return the differences of each response from the response at the same place in the step
    before, by step and row.

    Args:
        by_step: Samples of a prompt by step.
    """
    steps = sorted(by_step)
    return {
        (step, new["row"]): compare_words(
            printable(old["response"] or ""), printable(new["response"] or "")
        )
        for earlier, step in itertools.pairwise(steps)
        for old, new in zip(by_step[earlier], by_step[step], strict=False)
    }


def _sort_runs(runs: Sequence[Overview], column: str, descending: bool) -> list[Overview]:
    """Sort runs by a column; runs without a value are last in both directions."""
    with_value = [
        run for run in runs if run.state != UNREADABLE and getattr(run, column) not in (None, "")
    ]
    without_value = [run for run in runs if run not in with_value]
    return (
        sorted(with_value, key=lambda run: getattr(run, column), reverse=descending) + without_value
    )


def _link_builder(query: Mapping[str, str]) -> Callable[..., str]:
    """Return a function that returns the query string of the page with changed parameters."""
    return lambda **changes: urlencode(
        {name: value for name, value in {**query, **changes}.items() if value != ""}
    )


def _parse_number(parameters: Mapping[str, str], name: str) -> float | None:
    """Return a number of the query; None if it is missing. Raise HTTPException 400 if it is not a
    number."""
    text = parameters.get(name, "")
    try:
        number = float(text) if text else None
    except ValueError:
        number = math.nan
    # The comparison is also false for NaN.
    if number is not None and not abs(number) < 2**31:
        raise HTTPException(400, f"{name}={printable(text, 40)}: must be a number")
    return number


def _parse_json(text: str | None) -> Any:
    """Return the value of a JSON text; a text that is not JSON unchanged."""
    try:
        return None if text is None else parse_json(text)
    except ValueError:
        return text


def _indent_json(text: str) -> str:
    """Return JSON with indentation; a text that is not JSON unchanged."""
    try:
        return json.dumps(parse_json(text), indent=2, ensure_ascii=False)
    except ValueError:
        return text


def _replace_nonfinite(value: Any) -> Any:
    """Return a value with None in place of NaN and infinity, which JSON cannot represent."""
    if isinstance(value, dict):
        return {name: _replace_nonfinite(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_replace_nonfinite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
