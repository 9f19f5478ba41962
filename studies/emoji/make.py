"""Google's emoji as a folder of pictures, from the npm package `emoji-datasource-google` (Apache-2.0).

    python studies/emoji/make.py out/emoji        downloads the package there, and keeps the pictures to study

Left out are variants in other skin tones, and pictures that are the same at 16x16.
"""

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

PACKAGE = "emoji-datasource-google@16.0.0"
FOLDER, SKIN_TONES = "package/img/google/64/", re.compile("1f3f[b-f]")


def main(folder: Path) -> None:
    """Download the package, and remove what is not studied."""
    folder.mkdir(parents=True)
    subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=folder, check=True)
    (archive,) = folder.glob("*.tgz")
    with tarfile.open(archive) as file:
        file.extractall(folder, [each for each in file if each.name.startswith(FOLDER)], filter="data")
    seen = set()
    for path in sorted((folder / FOLDER).iterdir()):
        picture = Image.open(path).convert("RGBA")
        on_white = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
        small = np.asarray(on_white.resize((16, 16), Image.Resampling.LANCZOS)).tobytes()
        if SKIN_TONES.search(path.name) or small in seen:
            path.unlink()
        else:
            seen.add(small)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
