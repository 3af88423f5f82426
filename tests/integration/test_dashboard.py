"""The dashboard in a real Chromium, over TLS, against a controller that runs."""

from __future__ import annotations

import copy
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from sqlalchemy import update

from edgesplit.release.agent_release import AGENT_MODEL
from edgesplit_controller.storage.tables.core import Device, Model, TelemetryRow
from support import REPOSITORY
from support.browser import DESKTOP, PHONE, Browser, chromium, needs_browser
from support.dashboard_server import MODEL, Dashboard
from support.sample_fleet import device_row, make_audits, make_cascade_past, make_rollout

MANY = 1_000
AXE = REPOSITORY / "cloud_controller" / "dashboard" / "node_modules" / "axe-core" / "axe.min.js"
HOSTILE = "<img src=x onerror=document.title='owned'>"


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Dashboard]:
    """A controller with a thousand devices, which are made up. EDGESPLIT_DASHBOARD_PROCESSES: so many processes on
    PostgreSQL (`make test-dashboard`), else one on SQLite."""
    needs_browser()
    folder = tmp_path_factory.mktemp("dashboard")
    settings, database = grown(request)
    running = Dashboard.start(folder, *settings, database=database)
    try:
        running.fill(MANY, folder)
        yield running
    finally:
        running.stop()


def grown(request: pytest.FixtureRequest) -> tuple[list[str], str]:
    """Settings and database of an installation that has grown, where one is asked for."""
    processes = int(os.environ.get("EDGESPLIT_DASHBOARD_PROCESSES", "0"))
    return ([f"processes={processes}"], request.getfixturevalue("postgres").database()) if processes else ([], "")


@pytest.fixture(scope="module")
def signed_in(dashboard: Dashboard, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser that is signed in."""
    with chromium(tmp_path_factory.mktemp("chromium")) as browser:
        dashboard.sign_in(browser)
        yield browser


@pytest.fixture
def browser(dashboard: Dashboard, signed_in: Browser) -> Iterator[Browser]:
    """The same, on the fleet's page, as large as a desktop's; whatever it asked for was the controller's, and the
    console stayed silent."""
    signed_in.size(*DESKTOP)
    signed_in.open("about:blank")
    signed_in.open(dashboard.page())
    signed_in.one(".grid-row[data-index]")
    yield signed_in
    assert signed_in.hosts() == {urlsplit(dashboard.url).netloc}
    assert signed_in.problems() == []


def test_a_thousand_devices_are_shown_and_few_are_drawn(dashboard: Dashboard, browser: Browser) -> None:
    """The table says how long it is, draws only what is in view, and reaches its end."""
    assert browser.one("[role=grid]").get_attribute("aria-rowcount") == str(MANY + 2)
    assert len(browser.all(".grid-row[data-index]")) < 60
    browser.run("scrollTo(0, document.body.scrollHeight)")
    browser.one(f".grid-row[data-index='{MANY}']")
    assert len(browser.all(".grid-row[data-index]")) < 60


def test_the_fleet_is_filtered_by_text_and_by_failure_cause(dashboard: Dashboard, browser: Browser) -> None:
    """A filter by group and by a label, and a cause that is pressed, leave the devices that it holds for."""
    search = browser.one("#filter")
    search.send_keys("group=doors site=oslo")
    browser.wait("fewer devices", lambda: " of " in browser.text("output[for=filter]"))
    browser.wait("only doors", lambda: _column(browser, "group") == {"doors"})
    search.send_keys(Keys.CONTROL, "a")
    search.send_keys(Keys.DELETE)
    browser.one("section[aria-label='Problems by cause'] button").click()
    browser.wait("a cause in the filter", lambda: "cause=" in str(search.get_attribute("value")))
    assert "cause" in browser.run("return decodeURIComponent(location.hash)")
    browser.wait("devices with problems", lambda: all(_cells(browser, "cause")) and len(_cells(browser, "cause")) > 0)


def test_a_change_is_shown_as_it_happens(dashboard: Dashboard, browser: Browser) -> None:
    """A device that goes offline is shown so, without a word from the reader, whoever wrote it down."""
    browser.shows("live", ".live")
    name = dashboard.names[3]
    browser.one("#filter").send_keys(name)
    browser.wait("one row", lambda: _column(browser, "name") == {name})
    with dashboard.database.write() as session:
        session.execute(update(Device).where(Device.name == name).values(alive=False))
    browser.shows("offline", ".grid-row[data-index='0'] .state")


def test_a_script_in_a_name_is_shown_as_text(dashboard: Dashboard, browser: Browser) -> None:
    """Names and details that came from outside are shown letter by letter, on the fleet's page and on their own."""
    with dashboard.database.write() as session:
        session.add(device_row("evil-1", trouble=("failed", HOSTILE), model=HOSTILE, release="0" * 64, group=HOSTILE))
    browser.one("#filter").send_keys("evil-1")
    browser.shows(HOSTILE, ".grid-row[data-index='0']")
    browser.open(dashboard.page("devices", "evil-1"))
    browser.shows(HOSTILE, "section[aria-label='Desired and reported']")
    browser.open(dashboard.page("devices", HOSTILE))
    browser.shows("no device", ".problem")
    assert browser.driver.title != "owned" and browser.all("img") == []


def test_audits_stand_beside_the_promise(dashboard: Dashboard, browser: Browser) -> None:
    """On the pages of the device and of the model, where the sums are of all devices; a broken promise stands out."""
    make_audits(dashboard.database, dashboard.names[:2], MODEL, dashboard.release)
    browser.open(dashboard.page("devices", dashboard.names[0]))
    panel = f"section[aria-label='Who answers for {MODEL}']"
    browser.shows("small 72 %, large 28 %", panel)
    browser.shows("allowed 2 %, 31 of 412 audited differed", f"{panel} dd.warn")
    browser.shows("allowed 1 %, 3 of 643 audited differed", panel)
    browser.open(dashboard.page("models", dashboard.model))
    browser.shows("allowed 2 %, 35 of 824 audited differed", "section[aria-label='Answers that may change']")


def test_who_answers_is_charted_over_time(dashboard: Dashboard, browser: Browser) -> None:
    """On the model's page: shares of a cascade's answers, and what audits showed beside what is allowed."""
    make_cascade_past(dashboard.database, dashboard.model)
    browser.open(dashboard.page("models", dashboard.model))
    browser.button("1 h").click()
    browser.shows("escalated", "section[aria-label='Who answers']")
    for title, allowed in (("Changed by the cascade", "2 %"), ("Changed by repeating", "1 %")):
        browser.shows("at most", f"section[aria-label='{title}']")
        told = browser.one(f"section[aria-label='{title}'] .chart").get_attribute("aria-label")
        assert told is not None and told.endswith(f"{allowed} allowed") and "Audited answers that differed" in told


def test_a_devices_page_charts_its_latency_and_plan(dashboard: Dashboard, browser: Browser) -> None:
    """Charts of its reports, what it should run and runs, the plan and the point at which it is; all marked."""
    browser.open(dashboard.page("devices", dashboard.names[0]))
    browser.shows("Latency")
    browser.wait("charts", lambda: len(browser.all(".chart canvas")) >= 5)
    latency = browser.one("section[aria-label=Latency]")
    assert "simulated" in latency.text and "device" in latency.text and "remote" in latency.text
    assert dashboard.release[:8] in browser.text("section[aria-label='Desired and reported']")
    assert "predicted" in browser.text(f"section[aria-label='Plan of {dashboard.model}']")
    browser.shows("in use", f"section[aria-label='Plan of {dashboard.model}']")


def test_figures_of_a_silent_device_are_marked_as_old(dashboard: Dashboard, browser: Browser) -> None:
    """Its figures are its last, and the page says since when."""
    name = dashboard.names[5]
    with dashboard.database.write() as session:
        session.execute(update(Device).where(Device.name == name).values(last_seen=time.time() - 7_300, alive=True))
    browser.open(dashboard.page("devices", name))
    browser.shows("No message for 2 h")
    assert "stale" in browser.text(".head")
    assert browser.all("dl.figures.old") != []


def test_a_models_page_shows_the_plan_and_its_gain(dashboard: Dashboard, browser: Browser) -> None:
    """Per device class: the table, its curves in words, the gain."""
    browser.open(dashboard.page("models", dashboard.model))
    plan = "section[aria-label=raspberrypi4]"
    browser.shows("over all on the device", plan)
    assert "all on the device" in browser.text(f"{plan} table") and "best at the planned link" in browser.text(plan)


def test_a_rollout_is_watched_and_stopped_from_its_page(dashboard: Dashboard, browser: Browser) -> None:
    """Its stages and failures by cause are there; a button says what it will do before it does it, and Escape leaves
    it undone; once confirmed, the controller acts on it."""
    number = dashboard.deployment + 100
    make_rollout(dashboard.database, number, dashboard.names[:40], model=dashboard.model, release=dashboard.release)
    browser.open(dashboard.page("rollouts"))
    browser.shows("waiting", "main")
    browser.one(f"a[href='#/rollouts/{number}']").click()
    browser.shows("needs approval", "section[aria-label=Stages]")
    assert "16 simulated" in browser.text("section[aria-label=Stages]")
    assert "100%" in browser.text("section[aria-label=Stages]")
    browser.button("Approve the next stage").click()
    browser.shows("16 devices will be assigned", "dialog")
    _leave_dialog(browser)
    assert dashboard.up.ok("GET", f"/v1/rollouts/{number}")["state"] == "waiting"
    browser.button("Abort").click()
    browser.shows("36 devices will keep the present one", "dialog")
    browser.one("dialog button.danger").click()
    browser.wait("it ended", lambda: browser.text(".head .status") == "×aborted")
    assert dashboard.up.ok("GET", f"/v1/rollouts/{number}")["state"] == "aborted"


def test_a_device_is_claimed_and_a_model_deployed_from_the_pages(dashboard: Dashboard, browser: Browser) -> None:
    """The claim's text is shown once, with what to do with it; a deployment ends on its rollout's page. What is refused
    says why, and the form stays."""
    browser.button("Claim a device").click()
    browser.one("#field-name").send_keys("Not A Name")
    browser.button("Make the claim").click()
    browser.shows("not a device name", "dialog .problem")
    browser.one("#field-name").send_keys(Keys.CONTROL, "a")
    browser.one("#field-name").send_keys("by-page")
    browser.button("Make the claim").click()
    browser.shows("edgesplit-agent run --data edgesplit --claim by-page.claim", "dialog")
    claim = json.loads(str(browser.one("dialog textarea").get_attribute("value")))
    assert (claim["device"], claim["device_class"]) == ("by-page", "raspberrypi4")
    assert claim["token"] and claim["ca_pem"] and claim["controller_url"]
    browser.button("Close").click()
    browser.wait("the claim is gone", lambda: browser.all("dialog") == [])
    assert dashboard.up.ok("GET", "/v1/devices/by-page")["state"] == "claimed"
    browser.open(dashboard.page("models", dashboard.model))
    browser.button("Deploy").click()
    targets = browser.one("#field-devices")
    targets.send_keys(Keys.CONTROL, "a")
    targets.send_keys("no-such-device")
    browser.button("Plan, sign and roll out").click()
    browser.shows("no-such-device", "dialog .problem")
    targets.send_keys(Keys.CONTROL, "a")
    targets.send_keys("cam-1")
    browser.button("Plan, sign and roll out").click()
    browser.wait("the rollout's page", lambda: "#/rollouts/" in browser.driver.current_url)
    number = browser.driver.current_url.rpartition("/")[2]
    assert dashboard.up.ok("GET", f"/v1/rollouts/{number}")["targets"] == ["cam-1"]


def test_a_model_is_undeployed_from_the_pages(dashboard: Dashboard, browser: Browser) -> None:
    """A device's page names what ends there before it does; Escape leaves it. A model's page asks for devices and
    stages, and both end on the page of the rollout, which is called an undeployment. What is refused says why."""
    name = dashboard.names[11]
    browser.open(dashboard.page("devices", name))
    browser.shows("Undeploy", "section[aria-label='Desired and reported']")
    browser.one("section[aria-label='Desired and reported'] td button").click()
    browser.shows(f"release {dashboard.release[:8]} ends on 1 device: {name}.", "dialog")
    _leave_dialog(browser)
    assert MODEL in {entry["model"] for entry in dashboard.up.ok("GET", f"/v1/devices/{name}")["desired"]}
    browser.one("section[aria-label='Desired and reported'] td button").click()
    browser.one("dialog button.danger").click()
    browser.shows("Undeployment of", ".head")
    number = browser.driver.current_url.rpartition("/")[2]
    rollout = dashboard.up.ok("GET", f"/v1/rollouts/{number}")
    assert (rollout["targets"], rollout["withdraws"]) == ([name], True)
    browser.button("Roll back").click()
    browser.shows("the release again that each ran before", "dialog")
    _leave_dialog(browser)
    browser.open(dashboard.page("models", dashboard.model))
    browser.button("Undeploy").click()
    targets = browser.one("#field-devices")
    targets.send_keys(name)
    browser.button("Show what ends").click()
    browser.shows("on none of these devices", "dialog .problem")
    targets.send_keys(Keys.CONTROL, "a")
    targets.send_keys(",".join(dashboard.names[12:14]))
    browser.one("#field-stages").send_keys("1, 100%")
    browser.button("Show what ends").click()
    browser.shows("In stages: 1, then 100%.", "dialog")
    browser.one("dialog button.danger").click()
    browser.shows("Undeployment of", ".head")
    number = browser.driver.current_url.rpartition("/")[2]
    assert dashboard.up.ok("GET", f"/v1/rollouts/{number}")["devices"] == 2
    browser.open(dashboard.page("events"))
    browser.shows("undeployed", "main")


def test_the_page_of_a_revoked_device_shows_the_command_that_removes_it(dashboard: Dashboard, browser: Browser) -> None:
    """A browser's session may not delete records; there is nothing to undeploy either."""
    name = dashboard.names[15]
    with dashboard.database.write() as session:
        session.execute(update(Device).where(Device.name == name).values(revoked=time.time()))
    browser.open(dashboard.page("devices", name))
    browser.shows(f"edgectl device remove {name}", "main")
    assert browser.all("section[aria-label='Desired and reported'] td button") == []


def test_a_devices_page_says_why_its_model_runs_where_it_does(dashboard: Dashboard, browser: Browser) -> None:
    """The agent's own sentence, the busiest model first, and temperature, memory and address in the header."""
    name, sentence = dashboard.names[9], "the cloud: as planned, and 5.3 Mbit/s is enough (about 210 ms)"
    with dashboard.database.write() as session:
        device = session.get_one(Device, name)
        told = copy.deepcopy(device.telemetry or {})
        told["models"][0]["reason"] = sentence
        told["machine"] = {"memory_free_bytes": 1_500_000_000, "memory_bytes": 4_000_000_000}
        idle = {**told["models"][0], "model": "a-first-by-name", "requests": 0, "reason": ""}
        told["models"].insert(0, idle)
        device.telemetry = told
        session.add(TelemetryRow(device=name, at=told["at"], stored=told["at"], session=3, sequence=1, content=told))
    browser.open(dashboard.page("devices", name))
    browser.shows(sentence, "section[aria-label='Desired and reported']")
    browser.shows("1.5 GB of 4 GB", "dl.figures")
    assert "°C" in browser.text("dl.figures") and "http://127.0.0.1:1" in browser.text("dl.figures")
    browser.wait("busiest", lambda: browser.one(".choice select").get_attribute("value") == MODEL)


def test_the_fleets_page_shows_its_last_day(dashboard: Dashboard, browser: Browser) -> None:
    """Devices that report, p95, fallbacks and requests, each with its period."""
    for title in ("Devices reporting", "Mean p95", "Fallbacks", "Requests"):
        browser.shows("last 24 hours", f"section[aria-label='{title}']")
        browser.one(f"section[aria-label='{title}'] canvas")


def test_history_is_shown_by_hours_days_and_months(dashboard: Dashboard, browser: Browser) -> None:
    """A device's year on its page, and its model's over the fleet, which says how much no real device answered."""
    browser.open(dashboard.page("devices", dashboard.names[0]))
    browser.wait("charts", lambda: len(browser.all(".chart canvas")) >= 5)
    for range_, per in (("1 h", "minute"), ("24 h", "hour"), ("30 d", "day"), ("12 months", "month")):
        browser.button(range_).click()
        browser.one(f"section[aria-label='Requests per {per}'] canvas")
        browser.shows("simulated", f"section[aria-label='Requests per {per}']")
    browser.shows("worst p95", "section[aria-label=Latency]")
    browser.one("section[aria-label='Energy per request'] canvas")
    browser.open(dashboard.page("models", dashboard.model))
    browser.button("12 months").click()
    browser.one("section[aria-label='Requests per month'] canvas")
    browser.shows("100 % simulated", "section[aria-label='Measured on devices']")


def test_a_replan_proposal_shows_the_drift_and_waits_for_approval(dashboard: Dashboard, browser: Browser) -> None:
    """On its model's page: the drift, what is predicted and of whose measurements; what will be done is said before it
    is; dismissed by somebody else, the page says so by itself."""
    number = dashboard.propose("raspberrypi4")
    browser.open(dashboard.page("models", dashboard.model))
    part = f"article[aria-label='Proposal {number}']"
    browser.shows("31 % less", part)
    told = browser.text(part)
    assert "predicted" in told and "simulated" in told and "5.85 Mbit/s" in told and "1.52 Mbit/s" in told
    assert "server remote" not in told, "two hundredths are no drift"
    browser.button("Accept").click()
    browser.shows("signed by the planner's key", "dialog")
    _leave_dialog(browser)
    browser.shows("live", ".live")
    dashboard.up.ok("POST", f"/v1/proposals/{number}/dismiss")
    browser.shows("dismissed", part)
    browser.wait("no buttons", lambda: browser.all(f"{part} button") == [])


def test_unhealthy_parts_are_shown_with_advice(dashboard: Dashboard, browser: Browser) -> None:
    """No offload server runs here: the fleet's page says so, and each part stands on the system's page."""
    browser.shows("offload/offload.log", "section[aria-label=Components]")
    assert "broker" in browser.text(".parts-strip")
    browser.open(dashboard.page("system"))
    for name in ("broker", "database", "disk", "histories", "offload server", "processes"):
        browser.shows(name, "section[aria-label=Components] table")
    browser.shows("of them simulated", "section[aria-label=Devices]")


def test_an_agent_row_links_to_the_agents_versions(dashboard: Dashboard, browser: Browser) -> None:
    """It is no model: the link of a device that changes its agent shows the versions that were pushed."""
    build = {"python": "3.11", "machine": "aarch64", "extras": [], "bytes": 9_000_000, "sha256": "0" * 64, "build": ""}
    version = Model(
        name=AGENT_MODEL, version=1, sha256="0" * 64, optimised_sha256="", bytes=9_000_000, input_text="", bindings={},
        shown={"agent": "0.9.1", "builds": [build]}, created=time.time(),
    )  # fmt: skip
    with dashboard.database.write() as session:
        session.add(version)
        session.add(device_row("renewed-1", model=AGENT_MODEL, release="1" * 64))
    browser.open(dashboard.page("devices", "renewed-1"))
    browser.shows(AGENT_MODEL, "section[aria-label='Desired and reported']")
    browser.one("section[aria-label='Desired and reported'] a").click()
    browser.shows("Python 3.11 on aarch64", "main")
    assert "0.9.1" in browser.text("main") and browser.all(".problem") == []


def pages(dashboard: Dashboard) -> dict[tuple[str, ...], str]:
    """Every page, and what stands there once it is read."""
    return {
        (): "devices",
        ("devices", dashboard.names[0]): "Plan of",
        ("models",): "people@",
        ("models", dashboard.model): "planned for",
        ("rollouts",): "Rollout",
        ("rollouts", str(dashboard.deployment)): "Stages",
        ("events",): "deployed",
        ("system",): "version",
    }


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_fault_on_any_page(dashboard: Dashboard, browser: Browser, scheme: str) -> None:
    """Names, roles, contrast, landmarks, headings: axe-core's rules, in the system's light and dark."""
    if not AXE.is_file():
        pytest.skip("axe-core is not installed: `make dashboard` does where npm's registry can be reached")
    browser.colours(scheme)
    for parts, text in pages(dashboard).items():
        browser.open("about:blank")
        browser.open(dashboard.page(*parts))
        browser.shows(text, "main")
        browser.run(AXE.read_text("utf-8"))
        found = browser.driver.execute_async_script(
            "const done = arguments[arguments.length - 1]; axe.run(document).then(found => done(found.violations))"
        )
        told = [(one["id"], [node["html"][:160] for node in one["nodes"][:3]]) for one in found]
        assert told == [], (parts, scheme)


def test_every_page_fits_a_phone(dashboard: Dashboard, browser: Browser) -> None:
    """At 390 points nothing has to be scrolled sideways."""
    browser.size(*PHONE)
    for parts, text in pages(dashboard).items():
        browser.open(dashboard.page(*parts))
        browser.shows(text, "main")
        width = browser.run("return document.documentElement.scrollWidth")
        assert width <= PHONE[0], (parts, width)
        wide = browser.run(
            "return [...document.querySelectorAll('table.cards')].map(table => table.parentElement)"
            ".filter(outer => outer.scrollWidth > outer.clientWidth).length"
        )
        assert wide == 0, parts


def test_everything_is_reachable_by_keyboard(dashboard: Dashboard, browser: Browser) -> None:
    """The first stop leads past the navigation; in the table arrows walk the rows, also those not drawn yet, and Enter
    opens one. What has the focus can be seen."""
    browser.open("about:blank")
    browser.open(dashboard.page())
    browser.one(".grid-row[data-index]")
    _press(browser, Keys.TAB)
    assert browser.run("return document.activeElement.innerText") == "Skip to the page"
    _press(browser, Keys.ENTER)
    assert browser.run("return document.activeElement.id") == "main"
    browser.run("document.querySelector('.grid-row[data-index=\"0\"] a').focus()")
    _press(browser, Keys.END)
    last = str(int(browser.one("[role=grid]").get_attribute("aria-rowcount") or 0) - 2)
    browser.wait("the last row", lambda: _focused_row(browser) == last)
    _press(browser, Keys.ARROW_UP, Keys.HOME, Keys.ARROW_DOWN)
    browser.wait("the second row", lambda: _focused_row(browser) == "1")
    outline = browser.run("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    name = browser.run("return document.activeElement.innerText")
    _press(browser, Keys.ENTER)
    browser.shows(name, "h1")


def test_the_colour_scheme_follows_the_system_until_it_is_chosen(dashboard: Dashboard, browser: Browser) -> None:
    """Dark where the system is, light where it is; a choice stays over a new visit."""
    browser.colours("dark")
    dark = _background(browser)
    browser.colours("light")
    light = _background(browser)
    assert dark != light
    choice = browser.one(".theme select")
    choice.send_keys("dark")
    browser.wait("dark", lambda: _background(browser) == dark)
    browser.open("about:blank")
    browser.open(dashboard.page())
    browser.one(".theme select")
    assert _background(browser) == dark
    browser.one(".theme select").send_keys("as the system")
    browser.wait("light", lambda: _background(browser) == light)


def test_a_page_shows_that_it_lost_the_controller_and_reconnects(dashboard: Dashboard, browser: Browser) -> None:
    """While the controller is dead the page says since when it is not live; once it runs again the page follows by
    itself, and has read what it missed."""
    browser.shows("live", ".live")
    dashboard.up.end(signal.SIGKILL)
    browser.shows("not live for", ".live")
    name = dashboard.names[7]
    with dashboard.database.write() as session:
        session.execute(update(Device).where(Device.name == name).values(group="moved"))
    dashboard.restart()
    browser.wait("live again", lambda: browser.text(".live").endswith("●live"))
    browser.one("#filter").send_keys(name)
    browser.shows("moved", ".grid-row[data-index='0']")


def test_many_tabs_share_one_stream(dashboard: Dashboard, browser: Browser) -> None:
    """More tabs than a browser opens connections to a host: each is live, and still is when the first one is closed."""
    first = browser.driver.current_window_handle
    for _ in range(7):
        browser.driver.switch_to.new_window("tab")
        browser.open(dashboard.page("models"))
        browser.shows("people@", "main")
        browser.shows("●live", ".live")
    browser.driver.switch_to.window(first)
    browser.driver.close()
    for tab in browser.driver.window_handles[1:]:
        browser.driver.switch_to.window(tab)
        browser.driver.close()
    browser.driver.switch_to.window(browser.driver.window_handles[0])
    browser.shows("●live", ".live")


def test_a_login_code_works_once_and_signing_out_ends_the_session(dashboard: Dashboard, tmp_path: Path) -> None:
    """The code is gone from the address, no second browser comes in by it, and after signing out none is in."""
    with chromium(tmp_path) as browser:
        code = dashboard.up.ok("POST", "/v1/session/codes")["code"]
        browser.open(f"{dashboard.url}/#login={code}")
        browser.shows("Sign out")
        assert code not in browser.driver.current_url
        browser.button("Sign out").click()
        browser.shows("edgectl dashboard")
        browser.one("#token").send_keys(code, Keys.ENTER)
        browser.shows("used already", ".problem")
        browser.open(dashboard.page("devices", dashboard.names[0]))
        browser.shows("edgectl dashboard")


def test_an_address_pasted_into_an_open_sign_in_page_signs_in(dashboard: Dashboard, tmp_path: Path) -> None:
    """Only the part behind # changes then, so no page is loaded: nothing happened. A used address says that it was
    used, also where the page was loaded with it."""
    with chromium(tmp_path) as browser:
        browser.open(f"{dashboard.url}/")
        browser.shows("edgectl dashboard")
        code = dashboard.up.ok("POST", "/v1/session/codes")["code"]
        browser.run("location.href = arguments[0]", f"{dashboard.url}/#login={code}")
        browser.shows("Sign out")
        assert code not in browser.driver.current_url
        browser.button("Sign out").click()
        browser.shows("edgectl dashboard")
        browser.run("location.href = arguments[0]", f"{dashboard.url}/#login={code}")
        browser.shows("used already", ".problem")
        browser.one("#token").send_keys(code[:-1], Keys.ENTER)
        browser.shows("misspelt or incomplete", ".problem")


def _cells(browser: Browser, column: str) -> list[str]:
    """What the cells of one column say."""
    found: list[str] = browser.run(
        "return [...document.querySelectorAll('.grid-body .cell.' + arguments[0])].map(one => one.innerText)", column
    )
    return found


def _column(browser: Browser, column: str) -> set[str]:
    return set(_cells(browser, column))


def _press(browser: Browser, *keys: str) -> None:
    for key in keys:
        ActionChains(browser.driver).send_keys(key).perform()


def _leave_dialog(browser: Browser) -> None:
    """By Escape: pressed until it is gone, for a busy browser may lose a key."""

    def left() -> bool:
        _press(browser, Keys.ESCAPE)
        return browser.all("dialog") == []

    browser.wait("no dialog", left)


def _focused_row(browser: Browser) -> str:
    return str(browser.run("return document.activeElement.closest('[data-index]')?.dataset.index ?? ''"))


def _background(browser: Browser) -> str:
    return str(browser.run("return getComputedStyle(document.body).backgroundColor"))
