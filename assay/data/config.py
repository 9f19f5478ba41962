"""Which images: the settings `[data]` of a run and of a study, from stores to the source that is trained on."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from assay.data import ImageSource, open_store, view
from assay.data.copies import check_overlap
from assay.data.known import KNOWN, get_once
from assay.errors import AssayError, Rules
from assay.settings import Level, Seed, Strict

MIN_HELD_OUT, _MAX_HELD_OUT = 20, 3000  # by default: a loss needs 20 images, the two halves of a study 40


class DataConfig(Strict):
    """The images: where they are, which of them are trained on, and what noise is added. The same in studies.

    Keys act in the order of this list, each on what the ones before it left.
    """

    store: Path | tuple[Path, ...] = Field(
        description="A store, a data set that Assay knows by name (digits, fashion-mnist, cifar10), or a list "
        "of stores taken together."
    )
    size: int | None = Field(None, ge=1, description="Scale a known data set to size x size pixels.")
    classes: tuple[str, ...] = Field((), description="Keep only these classes of a known data set.")
    num_images: int | None = Field(None, ge=1, description="Keep only the first images of a known data set.")
    held_out: int | float | Path | None = Field(
        None,
        description="Images set aside for evaluation and never trained on: a share (0.1) or a number (500) of "
        "the clean images, or of the noisy ones if none is clean; or the path of another store. With "
        "num_images they are the images after the first num_images. Default: none; in studies a tenth.",
    )
    raise_to: Level | None = Field(None, description="Add noise to noisy images below this level, up to it.")
    clean: int | float = Field(1.0, ge=0, description="Clean images to use: a share (0.5) or a number (500).")
    noisy: int | float = Field(1.0, ge=0, description="Noisy images to use: a share (0.5) or a number (500).")
    levels: tuple[Level, Level] | None = Field(
        None, description="Keep only noisy images with a noise level between these two (or equal to one)."
    )
    clean_fraction: float | None = Field(
        None, ge=0, le=1, description="Simulate: this share of clean images stays clean, the others get noise."
    )
    sigma: Level | tuple[tuple[float, Level], ...] | None = Field(
        None, description="Simulate: the level of that noise, or a list of (share, level) for several levels."
    )
    keep_noisy: bool = Field(True, description="Simulate: false drops the images that would get noise.")
    seed: Seed = Field(0, description="Decides which images are chosen, and their noise.")
    block: int = Field(
        0, ge=0, description="Another number chooses other images and noise to train on; those held out stay."
    )

    def open(self) -> ImageSource:
        """The images to train on. Reads stores and writes nothing: known data sets are `prepared` first."""
        source, seed = self._split()[0], view.block_seed(self.seed, self.block)
        if self.raise_to is not None:
            source = view.raised(source, self.raise_to, seed)
        if self.sigma is not None and self.clean_fraction is None:
            assert isinstance(self.clean, int) and isinstance(self.noisy, int) and isinstance(self.sigma, float)
            return view.noised(source, self.clean, self.noisy, self.sigma, seed)
        if (self.clean, self.noisy, self.levels) != (1.0, 1.0, None):
            source = view.part(source, self.clean, self.noisy, self.levels, seed)
        if self.clean_fraction is None:
            return source
        sigma, keep = (1.0, False) if self.sigma is None else (self.sigma, self.keep_noisy)
        return view.simulate(source, self.clean_fraction, sigma, seed, keep)

    def open_held_out(self) -> ImageSource | None:
        """The images set aside, if any."""
        return self._split()[1]

    def _split(self) -> tuple[ImageSource, ImageSource | None]:
        if known := self._known:
            what, cure = "is known but not packed yet", "call prepared()"
            raise AssayError(what, path=known[0], key="data.store", cure=cure)
        stores = [open_store(path) for path in self.paths]
        source = view.usable(stores[0] if len(stores) == 1 else view.Joined(stores), self.seed)
        if not self.held_out:
            return source, None
        if isinstance(self.held_out, Path):
            held_out = view.usable(open_store(self.held_out), self.seed)
            view.Joined([source, held_out])  # an error if their images differ in shape or classes
            if held_out.fingerprint == source.fingerprint:
                raise AssayError("is the store that is trained on", path=self.held_out, key="data.held_out")
            return source, held_out
        kind: Literal["clean", "noisy"] = "clean" if bool((source.sigma_tn == 0).any()) else "noisy"
        return view.split_held_out(source, self.held_out, self.seed, kind)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The stores."""
        return (self.store,) if isinstance(self.store, Path) else self.store

    @property
    def _known(self) -> list[Path]:
        """The known data sets among the paths; a store here wins over a known name."""
        return [path for path in self.paths if str(path) in KNOWN and not (path / "meta.json").exists()]

    def prepared(self, folder: Path = Path("stores"), hold_out: bool = False) -> "DataConfig":
        """The same images with paths alone: known data sets are packed into `folder`, once.

        `hold_out`: unless `held_out` says otherwise, hold out the images that follow the first `num_images`,
        or a tenth.
        """
        known, held_out, num_following = self._known, self.held_out, 0
        given = [key for key in ("size", "classes", "num_images") if getattr(self, key)]
        if given and (len(self.paths) > 1 or not known):
            what = f"is for one known data set ({', '.join(KNOWN)}); data.store is a store of yours or a list"
            raise AssayError(what, key=f"data.{given[0]}", cure="pack the images you want")
        if self.num_images is not None and not isinstance(held_out, Path):
            number = _MAX_HELD_OUT * hold_out if held_out is None else held_out
            num_following = view.count_of(number, self.num_images)
        fewest = MIN_HELD_OUT if held_out is None else None
        part = self.size, self.classes, self.num_images, num_following, fewest
        stores = []
        for path in self.paths:
            if path in known:
                packed, following = get_once(str(path), folder, *part)
                held_out = following or held_out
            elif (packed := path) and not path.exists():
                what = f"is neither a store in {Path.cwd()} nor one of {', '.join(KNOWN)}"
                raise AssayError(what, path=path, key="data.store", cure="check the path, or pack one")
            stores.append(packed)
        store = stores[0] if len(stores) == 1 else tuple(stores)
        plain = {"store": store, "size": None, "classes": (), "num_images": None, "held_out": held_out}
        prepared = self.model_copy(update=plain)
        if held_out is None and hold_out:
            sigma_tn = prepared.open().sigma_tn
            num_there = int((sigma_tn == 0).sum()) or len(sigma_tn)
            number = next((n for n in (2 * MIN_HELD_OUT, MIN_HELD_OUT) if num_there >= 5 * n), 0)
            number = min(max(num_there // 10, number), _MAX_HELD_OUT) if number else 0
            prepared = prepared.model_copy(update={"held_out": number})
        source, aside = prepared._split()
        if aside is not None:
            check_overlap(source, aside)
        return prepared

    def rules(self) -> Rules:
        """A 1 is no share, levels are in order, and simulated noise has a level and images to be added to."""
        for key in ("clean", "noisy", "held_out"):
            value, cure = getattr(self, key), "write 1.0 for all of them"
            is_one = isinstance(value, int) and value == 1
            yield is_one, AssayError("1 would be one image", key=f"data.{key}", cure=cure)
        twice = len({*self.paths}) < len(self.paths)
        yield twice, AssayError("has a store twice", key="data.store", cure="name each once")
        what, levels = "the lowest level comes first, then the highest", self.levels or (0, 0)
        yield levels[0] > levels[1], AssayError(what, key="data.levels", cure="swap them")
        shared, what = self.clean_fraction is not None, "below 1 needs the noise of the other images"
        unknown = shared and self.clean_fraction != 1 and self.keep_noisy and self.sigma is None
        yield unknown, AssayError(what, key="data.clean_fraction", cure="set data.sigma")
        counted = isinstance(self.clean, int) and isinstance(self.noisy, int) and isinstance(self.sigma, float)
        what = "is for simulated noise (data.noisy = 0 drops images that really are noisy)"
        cure = "set data.clean_fraction too, or data.clean and data.noisy as numbers"
        alone = not shared and ((self.sigma is not None and not counted) or not self.keep_noisy)
        yield alone, AssayError(what, key="data.sigma" if self.keep_noisy else "data.keep_noisy", cure=cure)
