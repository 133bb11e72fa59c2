"""A pytest plugin for tools/gpu_check: prints a table, with a row for each test function."""

import collections
import dataclasses
import pathlib


@dataclasses.dataclass
class Row:
    """The results of a test function's cases; `detail` is why the first failed or was skipped."""

    seconds: float = 0.0
    cases: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    detail: str = ""

    def add(self, report):
        self.seconds += report.duration
        if report.failed:
            self.cases["FAILED"] += 1
            crash = getattr(report.longrepr, "reprcrash", None)
            text = crash.message if crash else str(report.longrepr)
            case = report.nodeid.partition("[")[2].rstrip("]")
            if self.cases["FAILED"] == 1:  # a failure's message replaces a skip's reason
                self.detail = " ".join(f"{case}: {text}".split())
        elif report.skipped:
            self.cases["skipped"] += 1
            self.detail = self.detail or report.longrepr[2].removeprefix("Skipped: ")
        elif report.when == "call":
            self.cases["ok"] += 1

    @property
    def result(self):
        return next(word for word in ("FAILED", "ok", "skipped") if self.cases[word])

    def counts(self):
        return ", ".join(f"{count} {word}" for word, count in self.cases.items())


rows = collections.defaultdict(Row)


def pytest_runtest_logreport(report):
    file, _, test = report.nodeid.partition("[")[0].partition("::")
    title = test.removeprefix("test_").replace("_", " ")
    rows[f"{pathlib.Path(file).stem.removeprefix('test_gpu_')}: {title}"].add(report)


def pytest_terminal_summary(terminalreporter):
    if not rows:
        return
    width = max(map(len, rows))
    lines = [f"{'check':{width}}  {'result':7}  {'seconds':>7}  cases"]
    for name, row in rows.items():
        lines.append(f"{name:{width}}  {row.result:7}  {row.seconds:7.1f}  {row.counts()}")
        if row.detail:
            lines.append(f"{'':{width}}  {row.detail[:160]}")
    terminalreporter.section("what GPUs have shown", sep="-")
    terminalreporter.write_line("\n".join(lines))
