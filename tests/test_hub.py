"""Published models: pushed to a folder and to a hub on this machine, and read from both."""

import base64
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Literal

import pytest
import torch

from assay.checkpoint import (
    Checkpoint,
    CheckpointInfo,
    export_checkpoint,
    find_checkpoint,
    load_checkpoint,
    load_tensors,
    save_checkpoint,
)
from assay.data.known import get
from assay.hub import model_card, push
from assay.nets import build_denoiser, preset
from assay.nets.unet import UNetConfig
from assay.pricing import PAPER
from tests.commands import failing, run
from tests.errors import fault

GOLDEN = Path(__file__).parent / "golden"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
AMBIENT = "giannisdaras/ambient_laws_digits_sigma_0.2_corruption_0.9_keep_1.0"


class Hub(BaseHTTPRequestHandler):
    """The part of Hugging Face's interface that pushing and pulling use, over a folder."""

    folder: Path

    def do_GET(self) -> None:
        """A file of a repository."""
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", self.path)
        file = self.folder / found[1] / found[2] if found else self.folder / "nothing"
        content = file.read_bytes() if file.is_file() else b""
        more = {} if file.is_file() else {"X-Error-Code": "EntryNotFound"}
        self._answer(200 if file.is_file() else 404, content, more)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Make a repository, say how files are sent, or take them."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            tree = json.loads(body)
            if tree.get("organization") == "forbidden":
                self._answer(403, b"{}", {"X-Error-Message": "You have no write access"})
                return
            self._send({"url": f"http://{self.headers['Host']}/{tree['organization']}/{tree['name']}"})
        elif self.path == "/api/validate-yaml":
            assert 'license: "' in json.loads(body)["content"]
            self._send({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = [file["path"] for file in json.loads(body)["files"]]
            self._send({"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in files]})
        else:
            repository = re.fullmatch(r"/api/models/(.+)/commit/main", self.path)
            assert repository is not None
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    path = self.folder / repository[1] / line["value"]["path"]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(base64.b64decode(line["value"]["content"]))
            url = f"http://{self.headers['Host']}/{repository[1]}/commit/{COMMIT}"
            self._send({"commitUrl": url, "commitOid": COMMIT, "success": True})

    def _send(self, tree: object) -> None:
        self._answer(200, json.dumps(tree).encode(), {})

    def _answer(self, status: int, content: bytes, more: dict[str, str]) -> None:
        self.send_response(status)
        etag = hashlib.sha1(content).hexdigest()
        headers = {"Content-Length": str(len(content)), "ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
        for name, value in (headers | more).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a hub that answers at an address of this machine."""
    from huggingface_hub import constants

    folder = tmp_path / "hub"
    folder.mkdir()
    handler = type("HubOfTest", (Hub,), {"folder": folder})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    yield folder
    server.shutdown()
    server.server_close()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    config = preset("mlp", (1, 8, 8), 0)
    info = CheckpointInfo(
        dataset="digits", num_images=1500, sigma_tn=((0.0, 0.1), (0.5, 0.9)), seed=0, clean_fraction=0.1
    )
    save_checkpoint(tmp_path / "model.safetensors", build_denoiser(config, 3), config, info)
    return tmp_path / "model.safetensors"


def test_a_model_is_pushed_with_its_card_and_read_by_its_name(
    hub: Path, checkpoint: Path, tmp_path: Path
) -> None:
    store = get("digits", tmp_path / "digits").store.path
    run("evaluate", checkpoint, "--held-out", store, "-o", tmp_path / "loss.json")
    options = "--license", "cc-by-4.0", "--result", tmp_path / "loss.json", "--prices", PAPER
    assert f"me/mix/commit/{COMMIT}" in run("model", "push", checkpoint, "hf:me/mix", *options)
    assert (hub / "me/mix/model.safetensors").read_bytes() == checkpoint.read_bytes()

    card = (hub / "me/mix/README.md").read_text()
    value = json.loads((tmp_path / "loss.json").read_text())["held_out_loss"]
    for text in (
        'license: "cc-by-4.0"',
        "| data set | digits |",
        "| clean | 0.1 |",
        "| 0.5 | 0.9 |",
        f"| loss, nats per dimension | {value:.3g} ±",
        "held-out images |",
        "assay sample hf:me/mix",
        "## What noisy images are worth here\n\n- ",
    ):
        assert text in card

    assert find_checkpoint(Path("hf:me/mix")).read_bytes() == checkpoint.read_bytes()
    run("model", "import", "hf:me/mix", tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == checkpoint.read_bytes()
    run("sample", "hf:me/mix", "-o", tmp_path / "hub.npz", "--seeds", "0-3", "--num-steps", 2)
    run("sample", checkpoint, "-o", tmp_path / "own.npz", "--seeds", "0-3", "--num-steps", 2)
    assert (tmp_path / "hub.npz").read_bytes() == (tmp_path / "own.npz").read_bytes()

    gone = failing("model", "import", "hf:nobody/nothing", tmp_path / "x.safetensors")
    assert "neither in the local cache nor reachable" in gone.what
    closed = failing("model", "push", checkpoint, "hf:forbidden/x", "--license", "mit")
    assert "hf auth login" in (closed.cure or "")


def test_models_of_ambient_laws_are_evaluated_by_name(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = {"image_shape": (1, 8, 8), "model_channels": 16, "channel_mult": (1,), "num_blocks": 1}
    config = UNetConfig(**size, attn_resolutions=())
    theirs = Checkpoint(build_denoiser(config, 1), config, CheckpointInfo())
    (hub / "giannisdaras").mkdir()
    export_checkpoint(theirs, hub / AMBIENT)
    store = get("digits", tmp_path / "digits").store.path
    options = ["--reference", store, "--extractor", "pixels", "--cache", tmp_path / "extractors"]
    options += ["--num-images", 20, "--num-ranges", 1, "--num-steps", 2]
    run("evaluate", f"hf:{AMBIENT}", *options, "-o", tmp_path / "result.json")
    sampler = json.loads((tmp_path / "result.json").read_text())["details"]["sampler"]
    assert sampler["info"]["dataset"] == "digits" and sampler["info"]["clean_fraction"] == pytest.approx(0.1)
    assert sampler["info"]["sigma_tn"] == [[0.0, 0.1], [0.2, 0.9]]
    pulled = tmp_path / "theirs.safetensors"
    run("model", "import", f"hf:{AMBIENT}", pulled)
    shutil.rmtree(hub)
    expected = theirs.denoiser.state_dict()
    for source in (pulled, Path(f"hf:{AMBIENT}")):  # the latter from the cache
        weights = load_checkpoint(source).denoiser.state_dict()
        assert all(torch.equal(weights[key], expected[key]) for key in expected)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", None)
    assert "[hub]" in str(fault(lambda: load_checkpoint(Path(f"hf:{AMBIENT}"))).cure)


def test_a_folder_serves_as_well(checkpoint: Path, tmp_path: Path) -> None:
    run("model", "push", GOLDEN / "edm_ddpmpp", tmp_path / "theirs", "--license", "mit")
    assert load_tensors(tmp_path / "theirs" / "model.safetensors")[1]["info"]["source"] == "edm_ddpmpp"
    run("model", "push", checkpoint, tmp_path / "shared" / "mix", "--license", "mit")
    assert "under mit" in (tmp_path / "shared/mix/README.md").read_text()
    assert load_checkpoint(tmp_path / "shared/mix").info == load_checkpoint(checkpoint).info
    again = failing("model", "push", checkpoint, tmp_path / "shared/mix", "--license", "mit")
    assert again.path == str(tmp_path / "shared/mix")


@pytest.mark.parametrize(
    "name",
    "hf:me|hf:me/a b|hf:|hf:me/a/b|https://huggingface.co/me/mix|hf://|HF:me/mix|s3:/mix|huggingface:me/mix".split(
        "|"
    ),
)
def test_what_is_no_name_on_the_hub_is_not_taken_for_a_folder(
    name: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert fault(lambda: push(checkpoint, name, "mit")).path == name
    assert sorted(tmp_path.rglob("*")) == before
    if name.startswith("hf:"):
        assert fault(lambda: load_checkpoint(Path(name))).path is not None


def test_words_of_a_card_are_words(checkpoint: Path) -> None:
    """Nothing that a data set, a folder or a licence is called becomes markup, a row or a command."""
    loaded = load_checkpoint(checkpoint)
    info = loaded.info.model_copy(update={"dataset": "a | b\n# c <script>", "source": "edm_x.pkl"})
    card = model_card(replace(loaded, info=info), "x\n## y *z*", "my model; rm -rf x", 'mit"\n- [a](b)')
    assert "imported into Assay" in card and "trained with Assay" not in card
    assert "trained with Assay" in model_card(loaded, "x", "x", "mit")
    many = tuple((level / 1000, 0.02) for level in range(50))
    levels = model_card(replace(loaded, info=info.model_copy(update={"sigma_tn": many})), "x", "x", "mit")
    assert "| clean | 0.02 |\n| 0.001 to 0.049 | 0.98 |\n\n" in levels
    assert "| data set | a \\| b # c \\<script\\> |" in card and "| imported from | edm_x.pkl |" in card
    assert "# x ## y \\*z\\*\n" in card and "assay sample 'my model; rm -rf x' -o" in card
    assert 'license: "mit\\"\\n- [a](b)"' in card and 'under mit" - \\[a\\](b). ' in card


def test_a_card_says_what_a_model_of_own_parts_needs(checkpoint: Path) -> None:
    class Own(UNetConfig):
        kind: Literal["on a card"] = "on a card"  # type: ignore[assignment]

    loaded = load_checkpoint(checkpoint)
    own = replace(loaded, config=Own(image_shape=(1, 8, 8)))
    own = replace(own, info=loaded.info.model_copy(update={"loss": "huber", "noise": "tri"}))
    card = model_card(own, "x", "x", "mit")
    assert "| loss | huber |\n| distribution of noise levels | tri |" in card
    assert "package with the module tests first" in card and "package" not in model_card(
        loaded, "x", "x", "mit"
    )
