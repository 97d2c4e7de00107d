"""Open a page in a real browser without a screen, and say what it shows: JSON on standard output.

    python tests/browser.py PAGE PICTURE [--dark] [--width 1200]

Needs Qt's Chromium: make browser.
"""

# pyright: reportMissingImports=false
import argparse
import json
import os
from pathlib import Path

from PySide6.QtCore import QTimer, QUrl
from PySide6.QtWebEngineCore import QWebEnginePage, QWebEngineProfile, QWebEngineUrlRequestInterceptor
from PySide6.QtWebEngineWidgets import QWebEngineView
from PySide6.QtWidgets import QApplication

_SHOWN = """(() => {
  const style = getComputedStyle(document.body);
  return JSON.stringify({
    title: document.title, text: document.body.innerText, background: style.backgroundColor, color: style.color,
    width: innerWidth, needs: document.documentElement.scrollWidth,
    drawings: [...document.querySelectorAll("figure svg")].map(svg => svg.getBoundingClientRect().height),
    lines: [...document.querySelectorAll("figure:first-child svg path")].map(p => getComputedStyle(p).stroke),
    marks: [...document.querySelectorAll("mark")].map(mark => [mark.className, mark.textContent]),
    scripts: document.scripts.length, hacked: typeof hacked,
  });
})()"""


class _Requests(QWebEngineUrlRequestInterceptor):
    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def interceptRequest(self, info) -> None:
        self.urls.append(info.requestUrl().toString())


class _Page(QWebEnginePage):
    said: list[str]

    def javaScriptConsoleMessage(self, level, message, line, source) -> None:
        self.said.append(message)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--width", type=int, default=1200)
    options = parser.parse_args()
    os.environ["QT_QPA_PLATFORM"] = "offscreen"
    flags = "--no-sandbox --disable-gpu"  # a container, and no screen
    os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = flags + " --blink-settings=preferredColorScheme=0" * options.dark
    app = QApplication([])
    profile, requests = QWebEngineProfile(), _Requests()
    profile.setUrlRequestInterceptor(requests)
    page = _Page(profile)
    page.said = []
    view = QWebEngineView()
    view.setPage(page)
    view.resize(options.width, 900)

    def tell(answer: str) -> None:
        print(json.dumps(json.loads(answer) | {"requests": requests.urls, "console": page.said}))
        QTimer.singleShot(500, save)  # what is loaded is not yet painted

    def save() -> None:
        view.grab().save(str(options.picture))
        app.quit()

    page.loadFinished.connect(lambda _: page.runJavaScript(_SHOWN, tell))
    view.load(QUrl.fromLocalFile(str(options.page.resolve())))
    view.show()
    app.exec()
    page.deleteLater()
    os._exit(0)  # Qt's own order of destruction warns


if __name__ == "__main__":
    main()
