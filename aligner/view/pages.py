"""The pages of `aligner view`, by their paths. All of them only read."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any
from urllib.parse import urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from aligner.errors import AlignerError
from aligner.observability.trace import read_spans
from aligner.view.figures import Plot, curves, metric_plots, timeline_plots
from aligner.view.rendering import STATIC, configuration, plotly_script, render
from aligner.view.run_index import (
    UNREADABLE,
    Overview,
    RunIndex,
    ViewedRun,
    differences,
    key_figures,
    left_out,
    log_end,
    log_files,
    log_trouble,
    stamp_of,
)
from aligner.view.sample_table import PAGE, SampleFilter, SampleTable
from aligner.view.shown_text import printable, token_columns, turns

_SORTS = ("name", "state", "step", "reward", "seconds_per_step", "started")
_SORT_NAMES = {
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
_MOST_RUNS, _MOST_TROUBLE = 8, 50
_Handler = Callable[["Pages", Request], Response]


def _of_run(page: Callable[["Pages", Request, ViewedRun], Response]) -> _Handler:
    """A page of the run that its path names."""

    @wraps(page)
    def answer(self: "Pages", request: Request) -> Response:
        return page(self, request, self._run(request.path_params["key"]))

    return answer


class Pages:
    """What the paths of the server lead to."""

    def __init__(self, index: RunIndex) -> None:
        self._index = index

    def routes(self) -> list[Route]:
        """For Starlette, which calls functions that are not asynchronous in threads."""
        sample = "/runs/{key}/samples/{step:int}/{row:int}"
        pages: dict[str, Callable[[Request], Response]] = {
            "/": self.run_list,
            "/compare": self.compare,
            "/compare/curves.json": self.compared_curves,
            "/static/plotly.min.js": lambda request: FileResponse(plotly_script()),
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
            f"{sample}/tokens.json": self.tokens,
            f"{sample}/over-time": self.over_time,
            f"{sample}/scores.json": self.scores,
        }
        return [Route(path, page, methods=["GET"]) for path, page in pages.items()]

    def run_list(self, request: Request) -> Response:
        """All runs."""
        given = request.query_params
        wanted = {
            "q": given.get("q", ""),
            "state": given.get("state", ""),
            "sort": given.get("sort", "-started"),
        }
        column = wanted["sort"].removeprefix("-")
        if column not in _SORTS:
            raise HTTPException(
                400,
                f"sort={wanted['sort']}: must be one of {', '.join(_SORTS)}, optionally with the"
                " prefix -",
            )
        runs = [run.overview() for run in self._index.runs()]
        text = wanted["q"].lower()
        shown = [
            run for run in runs if text in f"{run.name} {run.experiment} {run.directory}".lower()
        ]
        shown = [run for run in shown if wanted["state"] in ("", run.state)]
        return _page(
            "runs.html",
            directories=[str(directory) for directory in self._index.directories],
            runs=_sorted(shown, column, wanted["sort"].startswith("-")),
            total=len(runs),
            states=sorted({run.state for run in runs}),
            wanted=wanted,
            link=_linker(wanted),
        )

    def compare(self, request: Request) -> Response:
        """Some runs beside each other."""
        runs = self._named(request)
        shown = [run.overview() for run in runs.values()]
        try:
            rows, unknown = differences({name: run.config() for name, run in runs.items()}), ""
        except AlignerError as error:  # a run of another version
            rows, unknown = [], str(error)
        source = "/compare/curves.json?" + urlencode([("run", run.key) for run in runs.values()])
        return _page(
            "compare.html",
            runs=shown,
            names=list(runs),
            rows=rows,
            unknown=unknown,
            source=source,
            draws=True,
        )

    def compared_curves(self, request: Request) -> Response:
        """Their metrics over each other."""
        return _plots(
            list(curves({name: run.metrics() for name, run in self._named(request).items()}))
        )

    def static(self, request: Request) -> Response:
        """What pages are made of."""
        file = STATIC / request.path_params["name"]
        if file not in list(STATIC.iterdir()):
            raise HTTPException(404, "No such file.")
        return FileResponse(file)

    @_of_run
    def overview(self, request: Request, run: ViewedRun) -> Response:
        """A run's curves."""
        figures = key_figures(run.metrics())
        return self._run_page(
            "run.html",
            run,
            "Curves",
            figures=figures,
            source=f"/runs/{run.key}/curves.json",
            draws=True,
        )

    @_of_run
    def state(self, request: Request, run: ViewedRun) -> Response:
        """The head of a run's pages."""
        return _page("state.html", run=run.overview())

    @_of_run
    def curves(self, request: Request, run: ViewedRun) -> Response:
        """Its metrics."""
        stamp = f'"{hash(stamp_of(run.paths.metrics)):x}"'
        if request.headers.get("if-none-match", "").removeprefix("W/") == stamp:
            return Response(status_code=304)
        answer = _plots(list(metric_plots(run.metrics())))
        answer.headers["etag"] = stamp
        return answer

    @_of_run
    def timeline(self, request: Request, run: ViewedRun) -> Response:
        """What its processes did when."""
        return self._run_page(
            "timeline.html", run, "Timeline", source=f"/runs/{run.key}/timeline.json", draws=True
        )

    @_of_run
    def timeline_data(self, request: Request, run: ViewedRun) -> Response:
        """The same as plots."""
        return _plots(list(timeline_plots(read_spans(run.paths))))

    @_of_run
    def configuration(self, request: Request, run: ViewedRun) -> Response:
        """What it is set to."""
        others = [other.overview() for other in self._index.runs() if other is not run]
        return self._run_page(
            "configuration.html",
            run,
            "Configuration",
            about=configuration(run.config()),
            others=others,
        )

    @_of_run
    def logs(self, request: Request, run: ViewedRun) -> Response:
        """The end of a process's log."""
        files = log_files(run.paths.logs)
        name = request.query_params.get("file", files[0].name if files else "")
        file = next((each for each in files if each.name == name), None)
        if files and file is None:
            raise HTTPException(404, f"{name}: this run has no such log")
        lines, before = log_end(file) if file is not None else ([], 0)
        return self._run_page(
            "logs.html", run, "Logs", files=files, file=name, lines=lines, before=before
        )

    @_of_run
    def health(self, request: Request, run: ViewedRun) -> Response:
        """How its roles are, what was left out, and what its logs complain of."""
        trouble = log_trouble(run.paths.logs)[:_MOST_TROUBLE]
        about = {"status": run.status(), "left_out": left_out(run.metrics()), "trouble": trouble}
        return self._run_page("health.html", run, "Health", **about)

    @_of_run
    def samples(self, request: Request, run: ViewedRun) -> Response:
        """A page of its samples, or of its prompts."""
        given = request.query_params
        names = ("q", "least", "most", "first", "last", "by", "sort")
        wanted = {name: given.get(name, "") for name in names}
        sorts = _PROMPT_SORT_NAMES if wanted["by"] else _SORT_NAMES
        wanted["sort"] = wanted["sort"] if wanted["sort"] in sorts else next(iter(sorts))
        number, table = int(_number(given, "page") or 0), SampleTable(run.paths)
        bounds = {name: _number(given, name) for name in ("least", "most", "first", "last")}
        chosen = SampleFilter(wanted["q"], **bounds)  # type: ignore[arg-type]
        rows, total = (table.prompts if wanted["by"] else table.page)(
            chosen, wanted["sort"], max(0, number)
        )
        return self._run_page(
            "samples.html",
            run,
            "Samples",
            rows=rows,
            total=total,
            wanted=wanted,
            sorts=sorts,
            page=number,
            size=PAGE,
            has_all=table.has_all,
            link=_linker(wanted),
        )

    @_of_run
    def sample(self, request: Request, run: ViewedRun) -> Response:
        """One sample."""
        table, sample = self._sample(request, run)
        group = table.group(sample["step"], sample["group"]) if sample["group"] is not None else []
        metadata = sample.get("metadata")
        return self._run_page(
            "sample.html",
            run,
            "Samples",
            sample=sample,
            group=group,
            parts=sorted((sample.get("score_parts") or {}).items()),
            turns=turns(sample["messages"]),
            metadata="" if metadata in (None, "", "{}") else printable(_indented(metadata)),
            has_tokens=table.tokens(sample["step"], sample["row"]) is not None,
            has_all=table.has_all,
        )

    @_of_run
    def tokens(self, request: Request, run: ViewedRun) -> Response:
        """What was recorded of a response's tokens."""
        step, row = request.path_params["step"], request.path_params["row"]
        tokens = SampleTable(run.paths).tokens(step, row)
        if tokens is None:
            raise HTTPException(404, f"The token data of step {step} is no longer stored.")
        return JSONResponse(_finite(token_columns(tokens)))

    @_of_run
    def over_time(self, request: Request, run: ViewedRun) -> Response:
        """What came of a sample's prompt at several steps."""
        table, sample = self._sample(request, run)
        given = request.query_params.get("steps", "").replace(",", " ").split()
        means, by_step = table.over_time(
            sample["prompt"], [int(text) for text in given if text.isdecimal()][:_MOST_RUNS]
        )
        return self._run_page(
            "over_time.html",
            run,
            "Samples",
            prompt=sample["prompt"],
            means={row["step"]: row for row in means},
            known=[row["step"] for row in means],
            by_step=by_step,
            source=request.url.path.replace("over-time", "scores.json"),
            draws=True,
        )

    @_of_run
    def scores(self, request: Request, run: ViewedRun) -> Response:
        """A prompt's mean score by step."""
        table, sample = self._sample(request, run)
        means = [row for row in table.over_time(sample["prompt"], [])[0] if row["mean"] is not None]
        trace = {"type": "scatter", "mode": "lines+markers", "x": [row["step"] for row in means]}
        return _plots(
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

    def _run(self, key: str) -> ViewedRun:
        run = self._index.run(key)
        if run is None:
            raise HTTPException(404, "This run does not exist, or its directory was deleted.")
        return run

    def _named(self, request: Request) -> dict[str, ViewedRun]:
        """The runs of a comparison by names that differ."""
        runs = [self._run(key) for key in dict.fromkeys(request.query_params.getlist("run"))][
            :_MOST_RUNS
        ]
        if len(runs) < 2:
            raise HTTPException(400, "Select at least two runs to compare.")
        names = [run.overview().name for run in runs]
        twice = {name for name in names if names.count(name) > 1}
        return {
            str(run.paths.root) if name in twice else name: run
            for name, run in zip(names, runs, strict=True)
        }

    def _sample(self, request: Request, run: ViewedRun) -> tuple[SampleTable, dict[str, Any]]:
        table = SampleTable(run.paths)
        sample = table.sample(request.path_params["step"], request.path_params["row"])
        if sample is None:
            raise HTTPException(404, "This sample does not exist, or it is no longer stored.")
        return table, sample

    def _run_page(self, template: str, run: ViewedRun, tab: str, **values: Any) -> Response:
        return _page(template, run=run.overview(), tab=tab, **values)


def problem(request: Request, error: Exception) -> Response:
    """The page that tells of an error."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = error.detail if isinstance(error, HTTPException) else str(error)
    if not isinstance(error, HTTPException | AlignerError | OSError):
        message = f"{type(error).__name__}: {message}"
    title = {404: "Not found", 400: "Invalid request"}.get(status, "Cannot read the run")
    return HTMLResponse(render("problem.html", title=title, message=message), status)


def _page(template: str, **values: Any) -> Response:
    return HTMLResponse(render(template, **values))


def _plots(plots: Sequence[Plot]) -> Response:
    return JSONResponse([plot.content() for plot in plots])


def _sorted(runs: Sequence[Overview], column: str, descending: bool) -> list[Overview]:
    """Those without a value come last, whatever the direction."""
    known = [
        run for run in runs if run.state != UNREADABLE and getattr(run, column) not in (None, "")
    ]
    missing = [run for run in runs if run not in known]
    return sorted(known, key=lambda run: getattr(run, column), reverse=descending) + missing


def _linker(wanted: Mapping[str, str]) -> Callable[..., str]:
    """The query of the page that is shown, with some of it changed."""
    return lambda **changes: urlencode(
        {name: value for name, value in {**wanted, **changes}.items() if value != ""}
    )


def _number(given: Mapping[str, str], name: str) -> float | None:
    text = given.get(name, "")
    try:
        number = float(text) if text else None
    except ValueError:
        number = math.nan
    if number is not None and not abs(number) < 2**31:
        raise HTTPException(400, f"{name}={printable(text, 40)}: must be a number")
    return number


def _indented(text: str) -> str:
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except ValueError:
        return text


def _finite(value: Any) -> Any:
    """JSON has no other numbers: null in their place."""
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
