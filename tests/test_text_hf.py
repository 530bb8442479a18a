"""Hugging Face folders against transformers' own tokenizers, and against the same vocabulary from GGUF metadata."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import BadFile, Unsupported
from headrace.text.tokenizer import Tokenizer
from helpers_text import CONTROL, byte_library, byte_metadata, corpus
from helpers_text_strings import random_text


def metadata(folder: Path, **sections: Any) -> dict[str, Any]:
    files = {f.name: f for f in folder.iterdir()}
    return {"config": {}, "files": files, **sections}


def metaspace_library(scheme: str, byte_fallback: bool = True) -> Any:
    """A Llama-like tokenizer: Metaspace, byte fallback, <s> added in front."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    library = Library(models.BPE(byte_fallback=byte_fallback, unk_token="<unk>", fuse_unk=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if scheme != "never" else [])])
    names = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=names,
        initial_alphabet=[f"<0x{b:02X}>" for b in range(256)],
        show_progress=False,
    )
    library.train_from_iterator([t for t in corpus() if "<" not in t], trainer)
    state = json.loads(library.to_str())
    vocab = state["model"]["vocab"]
    for b in range(256):
        vocab.setdefault(f"<0x{b:02X}>", len(vocab))
    library = Library.from_str(json.dumps(state))
    library.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return library


def random_texts(count: int, seed: int) -> list[str]:
    r = random.Random(seed)
    return [random_text(r) for _ in range(count)]


def test_byte_level_like_transformers_and_like_gguf(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    byte_library().save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": "T"}
    ours = Tokenizer.from_metadata(metadata(tmp_path, tokenizer_config=config, config={"eos_token_id": [0, 2]}))
    gguf = Tokenizer.from_metadata(byte_metadata())
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for text in random_texts(500, 1):
        assert ours.encode(text) == gguf.encode(text)
        ids = ours.encode(text, special=True)
        assert ids == gguf.encode(text, special=True) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids, special=True) == gguf.decode(ids, special=True) == text
    assert (ours.bos, ours.eos, ours.ends, ours.add_bos, ours.template) == (1, 2, {0, 2}, False, "T")
    assert dict(ours.vocab.control) == {name: i for i, name in enumerate(CONTROL)}
    assert ours.size == gguf.size


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_metaspace_like_transformers(scheme: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    metaspace_library(scheme).save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_metadata(metadata(tmp_path, special_tokens_map={"bos_token": "<s>", "eos_token": "</s>"}))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert (ours.bos, ours.eos, ours.add_bos, ours.vocab.space_prefix) == (1, 2, True, scheme != "never")
    for text in random_texts(300, 2):
        text = text.replace("▁", "") or "a"  # the decoder makes it a space
        assert ours.encode(text, special=True, add_bos=False) == theirs.encode(text, add_special_tokens=False)
        plain = ours.encode(text)
        assert plain[0] == 1
        assert not {1, 2} & set(plain[1:])
        if "<0x" not in text:  # a name that this library's model can merge to a byte token
            # Metaspace takes a space that is there for its own.
            assert ours.decode(plain) == (text if scheme == "never" else text.removeprefix(" "))
    assert ours.encode("a</s>b c", special=True) == theirs.encode("a</s>b c")


def test_marks_of_a_template_are_control_tokens_whatever_the_file_says(tmp_path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer

    library = Tokenizer.from_str(byte_library().to_str())
    library.add_tokens([AddedToken("<｜User｜>", normalized=False, rstrip=True)])
    library.save(str(tmp_path / "tokenizer.json"))
    ours = from_folder(tmp_path)
    mark = ours.vocab.control["<｜User｜>"]
    assert mark not in ours.encode("<｜User｜> hi")
    assert ours.decode(ours.encode("<｜User｜> hi")) == "<｜User｜> hi"
    assert ours.encode("<｜User｜> \n hi", special=True) == [mark, *ours.encode("hi")]
    assert ours.encode("<think>") == [ours.size - 2]


def from_folder(folder: Path) -> Tokenizer:
    return Tokenizer.from_metadata(metadata(folder))


def test_vocab_and_merges(tmp_path: Path) -> None:
    """As OPT has them: </s> begins every text."""
    state = json.loads(byte_library().to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(state["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(m) for m in state["merges"]) + "\n")
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<think>": len(state["vocab"])}))
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|im_start|>", "add_bos_token": True}
    sections = {"tokenizer_config": config, "special_tokens_map": {"additional_special_tokens": CONTROL[2:]}}
    ours = Tokenizer.from_metadata(metadata(tmp_path, **sections))
    gguf = Tokenizer.from_metadata(byte_metadata())
    assert ours.add_bos
    for text in random_texts(300, 3):
        assert ours.encode(text) == [1, *gguf.encode(text)]
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode("<|im_end|>", special=True) == [1, 2]
    opt = Tokenizer.from_metadata(metadata(tmp_path, config={"model_type": "opt", "bos_token_id": 2}))
    assert opt.bos == 2
    with pytest.raises(Unsupported, match="BartTokenizer"):
        Tokenizer.from_metadata(metadata(tmp_path, tokenizer_config={"tokenizer_class": "BartTokenizer"}))
    with pytest.raises(Unsupported, match="add_prefix_space"):
        Tokenizer.from_metadata(metadata(tmp_path, tokenizer_config=config | {"add_prefix_space": True}))
    (tmp_path / "vocab.json").write_text('{"a": "b"}')
    with pytest.raises(BadFile, match="map tokens to ids"):
        Tokenizer.from_metadata(metadata(tmp_path, **sections))


def test_templates_of_a_folder(tmp_path: Path) -> None:
    byte_library().save(str(tmp_path / "tokenizer.json"))
    several = [{"name": "tool_use", "template": "B"}, {"name": "default", "template": "A"}]
    assert Tokenizer.from_metadata(metadata(tmp_path, tokenizer_config={"chat_template": several})).template == "A"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "C"}')
    assert from_folder(tmp_path).template == "C"
    (tmp_path / "chat_template.jinja").write_text("D")
    assert from_folder(tmp_path).template == "D"


def test_folders_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"no tokenizer\.json"):
        from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(Unsupported, match="save_pretrained"):
        from_folder(tmp_path)
    path = tmp_path / "tokenizer.json"
    for text in ("", "<html>", "{}", "[" * 100_000, byte_library().to_str()[:1000]):
        path.write_text(text)
        with pytest.raises(BadFile, match="can't be read as a tokenizer"):
            from_folder(tmp_path)
    with path.open("wb") as f:
        f.truncate(1 << 30)
    with pytest.raises(BadFile, match="over 64 MiB"):
        from_folder(tmp_path)
    state = json.loads(byte_library().to_str())
    state["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    path.write_text(json.dumps(state))
    with pytest.raises(Unsupported, match="WordPiece"):
        from_folder(tmp_path)
    byte_library().save(str(path))
    with pytest.raises(BadFile, match="add_bos_token"):
        Tokenizer.from_metadata(metadata(tmp_path, tokenizer_config={"add_bos_token": True}))
    with pytest.raises(BadFile, match="JSON object"):
        Tokenizer.from_metadata(metadata(tmp_path, tokenizer_config=[1]))
