"""The run's page in a real browser: nothing overlaps or leaves the screen, all text can be read, values are shown."""

import pytest

from sluice.agent.report import page
from tests.agent import grown_run
from tests.browser import CHROMIUM, WITHOUT, browser
from tests.product import Run, count, percent, seconds

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT)]

RUNS = {
    "five seconds": {"seconds": 5.0, "looks": 5},
    "a minute": {"seconds": 60.0, "looks": 60, "decisions": 3, "faults": 2},
    "ten hours": {"seconds": 36_000.0, "looks": 1_800, "decisions": 60, "faults": 14},
}
TEXTS = """
  document.querySelectorAll("details").forEach(one => one.open = true);
  charts.forEach(chart => chart.draw());
  const texts = [], walk = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode, range = document.createRange();
    if (!node.data.trim() || node.parentNode.closest("script, noscript")) continue;
    range.selectNodeContents(node);
    const style = getComputedStyle(node.parentNode);
    for (const box of range.getClientRects())
      if (box.width > 1 && box.height > 1) texts.push({text: node.data.trim(), box, node: node.parentNode, style});
  }
"""
OVERLAPS = (
    """(() => {%s
  const found = [];
  texts.sort((a, b) => a.box.top - b.box.top);
  texts.forEach((a, n) => {
    for (const b of texts.slice(n + 1)) {
      if (b.box.top > a.box.bottom - 3) break;
      if (Math.min(a.box.right, b.box.right) - Math.max(a.box.left, b.box.left) > 1
          && Math.min(a.box.bottom, b.box.bottom) - b.box.top > 3) found.push(`${a.text} | ${b.text}`);
    }
    if (a.box.right > innerWidth || a.box.left < 0) found.push(`off the screen: ${a.text}`);
  });
  return {found, texts: texts.length};
})()"""  # noqa: UP031
    % TEXTS
)
OUTSIDE = """charts.flatMap(chart => {
  const frame = chart.plot.querySelector("svg").getBoundingClientRect();
  const late = moments(chart.data.end, 8).filter(at => at > chart.data.end);
  return [...late, ...[...chart.plot.querySelectorAll("polyline, polygon, rect, .mark line")]
    .map(one => one.getBoundingClientRect())
    .filter(box => box.right > frame.left + chart.right + 2 || box.left < frame.left + chart.left - 2)];
}).map(String)"""
CONTRAST = (
    """(() => {%s
  const parse = colour => { const [r, g, b, a = 1] = colour.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
  const over = ([r, g, b, a], back) => [r, g, b].map((one, n) => one * a + back[n] * (1 - a));
  const luminance = colour => colour.map(one => one / 255).map(
    one => one <= .04045 ? one / 12.92 : ((one + .055) / 1.055) ** 2.4)
    .reduce((sum, one, n) => sum + one * [.2126, .7152, .0722][n], 0);
  const back = node => {
    const behind = node.parentElement ? back(node.parentElement) : [255, 255, 255];
    return over(parse(getComputedStyle(node).backgroundColor), behind);
  };
  const found = {};
  for (const {node, style, text} of texts) {
    const behind = back(node), colour = over(parse(node.ownerSVGElement ? style.fill : style.color), behind);
    const [low, high] = [luminance(colour), luminance(behind)].sort((a, b) => a - b);
    const ratio = (high + .05) / (low + .05), size = parseFloat(style.fontSize);
    if (ratio < (size >= 24 || size >= 18.66 && style.fontWeight >= 700 ? 3 : 4.5)) found[text] = ratio.toFixed(2);
  }
  return found;
})()"""  # noqa: UP031
    % TEXTS
)


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A browser, and the pages of the runs."""
    folder = tmp_path_factory.mktemp("pages")
    pages = {
        name: page.write(grown_run.write(folder / name.replace(" ", "-"), **made))
        for name, made in RUNS.items()
    }
    with browser(folder / "profile") as chromium:
        yield chromium, pages


@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.parametrize("name", RUNS)
def test_no_label_touches_another_all_can_be_read_and_nothing_is_above_100_percent(
    shown, name, width
):
    chromium, pages = shown
    chromium.open(pages[name].as_uri(), width=width)
    overlaps = chromium.value(OVERLAPS)
    assert not overlaps["found"]
    assert overlaps["texts"] > 60
    assert chromium.value("document.documentElement.scrollWidth") <= width
    assert chromium.value(
        "charts.length > 8 && charts.every(one => one.plot.querySelector('polyline, circle'))"
    )
    assert chromium.value(OUTSIDE) == [], "nothing is drawn beyond where the data end"
    shares = chromium.value("document.body.innerText.match(/[\\d.]+(?=.%)/g).map(Number)")
    assert shares
    assert max(shares) <= 100
    assert chromium.value(CONTRAST) == {}
    chromium.dark(True)
    assert chromium.value("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 26)"
    assert chromium.value(CONTRAST) == {}
    assert not chromium.complaints


def test_values_are_shown_where_one_points_with_the_decision_and_the_fault_there(shown):
    chromium, pages = shown
    chromium.open(pages["a minute"].as_uri(), width=1400)
    run = Run.read(pages["a minute"].parent)
    decision, fault = run.of("decision")[0], run.of("fault")[0]

    def tip(at):
        x, y = chromium.value(
            f"(() => {{ const box = charts[0].plot.getBoundingClientRect();"
            f"return [box.left + charts[0].x({at}), box.top + 120]; }})()"
        )
        chromium.point(x, y)
        return chromium.value("charts[0].plot.querySelector('.tip').innerText").replace("\xa0", " ")

    (look,) = [line for line in run.of("loader") if line["at"] == 30.0]
    for text in (
        "30 s",
        count(float(f"{look['rows_per_s']:.5g}")),
        percent(look["stall"]),
        "with one worker a stage",
    ):
        assert text in tip(30.0)
    assert "1. squash 1 → 2" in tip(decision["at"])
    assert f"A. At {seconds(fault['at'])} {fault['fault']}" in tip(fault["at"] + 0.5)
    assert chromium.value("charts.filter(chart => chart.cross.style.display === '').length") == len(
        chromium.value("charts.map(chart => 1)")
    ), "the moment is shown in all charts"
    chromium.point(2, 2)
    assert chromium.value("document.querySelector('.tip')") is None
