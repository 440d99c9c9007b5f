"""What a person is shown, and asked, before a large download starts."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from trainkit.base.errors import ConfigError, Exit
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.data.sources.contract import Shard
from trainkit.jobs.schema import Dataset

LARGE_DOWNLOAD = 10_000_000_000  # bytes that start without a word


@dataclass(frozen=True)
class DownloadNotice:
    """A large download that is about to start.

    Args:
        dataset: its name.
        files: still to come.
        bytes: still to come, as far as their servers say.
        licence: as jobs.toml gives it, or None.
        homepage: where it is described, or None.
        accepted: jobs.toml says accept_download = true.
        free: bytes free where it goes; None: nothing of it is kept.
    """

    dataset: str
    files: int
    bytes: int
    licence: str | None
    homepage: str | None
    accepted: bool
    free: int | None

    def __str__(self) -> str:
        lines = [
            f"{self.dataset}: {self.files:,} files, {self.bytes / 1e9:,.0f} GB are to be fetched"
        ]
        lines.append(f"  licence: {self.licence or 'not stated in jobs.toml'}")
        if self.homepage:
            lines.append(f"  described at {self.homepage}")
        if self.free is not None:
            lines.append(f"  {self.free / 1e9:,.0f} GB are free where it goes")
        return "\n".join(lines)

    def refusal(self) -> ConfigError:
        """What to raise where nobody has said yes."""
        hint = (
            f"look at the licence, then: accept_download = true in [datasets.{self.dataset}], or"
            " say yes on a terminal"
        )
        return ConfigError(
            f"{self}\n  nobody has agreed to a download of more than"
            f" {LARGE_DOWNLOAD / 1e9:,.0f} GB",
            exit=Exit.STAGE_FAILED,
            hint=hint,
        )

    def check_space(self) -> None:
        """Raise ConfigError (exit 6) where the disk cannot hold it."""
        if self.free is not None and self.bytes > self.free:
            raise ConfigError(
                f"{self}\n  it does not fit there",
                exit=Exit.STAGE_FAILED,
                hint="make room, set clusters.X.root to a larger disk, or keep_download = false",
            )


def download_notice(
    dataset: Dataset, corpus: Path, shards: Sequence[Shard]
) -> DownloadNotice | None:
    """What is to be said before `shards` are fetched below `corpus`, or None where that is no
    large download."""
    coming = [shard for shard in shards if shard.remote and not shard.path.is_file()]
    size = sum(shard.size for shard in coming)
    if not all(shard.size for shard in coming):  # a server does not say
        size = max(size, dataset.download_bytes or 0)
    if size <= LARGE_DOWNLOAD:
        return None
    there = next(folder for folder in (corpus, *corpus.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(there).free if dataset.keep_download else None
    return DownloadNotice(
        dataset.name,
        len(coming),
        size,
        dataset.licence,
        dataset.homepage,
        dataset.accept_download,
        free,
    )
