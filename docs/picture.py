"""Draws docs/report.png: findings and attention maps of the report that `heedful look` writes, by a headless Chromium."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
]  # fmt: skip
SIZE = (1240, 1750)
SHOWN = 1000  # pixels across
LARGEST = 300_000  # bytes


def main(picture: Path) -> None:
    from PIL import Image

    import heedful

    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("docs/picture.py needs chromium or google-chrome to draw the report")
    with tempfile.TemporaryDirectory() as folder:
        page, shot = Path(folder) / "report.html", Path(folder) / "shot.png"
        heedful.look().save(page)
        # The policy of the page forbids foreign styles, such as the one that leaves the other sections out here.
        html = re.sub(r"<meta http-equiv=.?Content-Security-Policy[^>]*>", "", page.read_text("utf-8"))
        page.write_text(
            html.replace("</head>", "<style>section:not(#findings, #attention) { display: none }</style></head>"),
            "utf-8",
        )
        window = [f"--window-size={SIZE[0]},{SIZE[1]}", f"--user-data-dir={folder}/profile", f"--screenshot={shot}"]
        subprocess.run([browser, *FLAGS, *window, page.as_uri()], check=True, capture_output=True, timeout=120)
        drawn = Image.open(shot).convert("RGB").resize((SHOWN, SHOWN * SIZE[1] // SIZE[0]), Image.Resampling.LANCZOS)
        drawn.quantize(128, dither=Image.Dither.NONE).save(picture, optimize=True)
    size = picture.stat().st_size
    if size > LARGEST:
        sys.exit(f"{picture} has {size:,} bytes, more than {LARGEST:,}; draw less of the page, or with fewer colours")
    print(f"wrote {picture}, {size:,} bytes")


if __name__ == "__main__":
    main(Path(__file__).with_name("report.png"))
