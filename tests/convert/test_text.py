"""Text and JSON Lines, as strings and as tokens."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from lightning_fastio import NumpyDataModule, open_reader
from lightning_fastio.convert import convert
from lightning_fastio.errors import ConfigError, CorruptFileError, FileAccessError, FormatError
from tests.convert.pictures import DESTINATIONS, destination_options, read_all

LINES = ["Grüße", "two words", "", "x" * 3000, "the end"]


@pytest.mark.parametrize("name", DESTINATIONS)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_lines_become_rows_and_empty_ones_are_left_out(tmp_path, name, newline):
    (tmp_path / "in.txt").write_bytes(newline.join(LINES).encode("utf-8-sig"))
    convert(tmp_path / "in.txt", tmp_path / name, num_workers=0, **destination_options(name))
    assert read_all(tmp_path / name) == {"text": [line for line in LINES if line]}


def test_a_folder_of_files_line_by_line_or_as_documents(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for number in (10, 2, 1):
        (folder / f"{number}.txt").write_text(f"{number}\nsecond")
    (folder / "3.txt.gz").write_bytes(gzip.compress(b"3\nsecond"))
    convert(folder, tmp_path / "lines.parquet", num_workers=0)
    convert(folder, tmp_path / "files.parquet", documents="file", num_workers=0)
    assert read_all(tmp_path / "lines.parquet")["text"] == ["1", "second", "2", "second", "3", "second", "10", "second"]
    assert read_all(tmp_path / "files.parquet")["text"] == [f"{number}\nsecond" for number in (1, 2, 3, 10)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_many_lines_keep_their_order_over_pieces(tmp_path, num_workers):
    lines = [f"line {number} " + "a" * (number % 50) for number in range(60_000)]
    (tmp_path / "in.txt").write_text("\n".join(lines) + "\n")
    manifest = convert(tmp_path / "in.txt", tmp_path / "out.parquet", num_workers=num_workers)
    assert read_all(tmp_path / "out.parquet")["text"] == lines
    assert manifest.num_rows == len(lines)


def test_text_that_is_not_utf_8_is_named_by_its_line(tmp_path):
    (tmp_path / "in.txt").write_bytes(b"good\n\xff\xfe\nlast")
    with pytest.raises(CorruptFileError, match=r"in\.txt:2: .*utf-8"):
        convert(tmp_path / "in.txt", tmp_path / "out.h5", num_workers=0)
    manifest = convert(tmp_path / "in.txt", tmp_path / "out.h5", num_workers=0, on_error="skip")
    assert read_all(tmp_path / "out.h5")["text"] == ["good", "last"]
    assert [entry.item for entry in manifest.skipped] == ["in.txt:2"]


@pytest.mark.parametrize("name", DESTINATIONS)
def test_json_keys_take_the_type_that_holds_all_records(tmp_path, name):
    records = [
        {"whole": 1, "mixed": 1, "flag": True, "word": "a", "list": [1, 2], "deep": {"a": 1}},
        {"whole": -5, "mixed": 0.5, "flag": False, "word": "b", "list": [], "deep": [{"b": "é"}]},
        {"whole": 2**40, "mixed": None, "flag": True, "word": None, "list": [3], "late": 7},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, records)))
    convert(tmp_path / "in.jsonl", tmp_path / name, num_workers=0, **destination_options(name))
    rows = read_all(tmp_path / name)
    np.testing.assert_array_equal(rows["whole"], np.array([1, -5, 2**40]))
    np.testing.assert_array_equal(rows["mixed"], np.array([1, 0.5, np.nan]))
    np.testing.assert_array_equal(rows["flag"], np.array([True, False, True]))
    assert rows["flag"].dtype == bool
    assert rows["word"] == ["a", "b", ""]
    assert [values.tolist() for values in rows["list"]] == [[1, 2], [], [3]]
    assert rows["deep"] == ['{"a": 1}', '[{"b": "é"}]', ""]
    np.testing.assert_array_equal(rows["late"], np.array([np.nan, np.nan, 7]))


def test_null_fill_stands_in_for_what_records_lack(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"n": 5, "word": "a"}\n{"word": null}\n{"n": 2}')
    convert(tmp_path / "in.jsonl", tmp_path / "out.h5", num_workers=0, null_fill={"n": -1, "word": "?"})
    rows = read_all(tmp_path / "out.h5")
    assert rows["n"].tolist() == [5, -1, 2]
    assert rows["n"].dtype == np.int64
    assert rows["word"] == ["a", "?", "?"]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ('{"n": 90071992547409931}\n{}', ConfigError, "would be rounded"),
        ('{"b": true}\n{}', ConfigError, "no truth value"),
        ('{"a": 1}\n{"a": ', CorruptFileError, r"in\.jsonl:2"),
        ('{"a": 1}\n[1]', CorruptFileError, r"in\.jsonl:2: a list"),
    ],
)
def test_json_that_fits_no_column_is_refused(tmp_path, text, error, message):
    (tmp_path / "in.jsonl").write_text(text)
    with pytest.raises(error, match=message):
        convert(tmp_path / "in.jsonl", tmp_path / "out.h5", num_workers=0)


@pytest.mark.parametrize("name", DESTINATIONS)
def test_tokens_keep_their_documents(tmp_path, name):
    (tmp_path / "in.txt").write_text("\n".join(LINES))
    manifest = convert(
        tmp_path / "in.txt",
        tmp_path / name,
        tokenizer="bytes",
        end_of_text=256,
        num_workers=0,
        **destination_options(name),
    )
    tokens = read_all(tmp_path / name)["tokens"]
    expected = [[*line.encode(), 256] for line in LINES if line]
    assert [document.tolist() for document in tokens] == expected
    assert manifest.fields == {"tokens": "ragged uint16"}
    assert manifest.statistics["tokens"]["num_values"] == sum(map(len, expected))


def test_a_stream_of_tokens_is_read_in_windows_by_the_data_module(tmp_path):
    (tmp_path / "in.txt").write_text("\n".join(LINES))
    convert(tmp_path / "in.txt", tmp_path / "out", format="numpy", tokenizer="bytes", end_of_text=0, num_workers=0)
    convert(tmp_path / "in.txt", tmp_path / "stream.npy", tokenizer="bytes", end_of_text=0, num_workers=0)
    stream = np.concatenate([[*line.encode(), 0] for line in LINES if line])
    files = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert {"tokens.npy", "tokens.offsets.npy"} <= set(files)
    for source in (tmp_path / "out" / "tokens.npy", tmp_path / "stream.npy"):
        assert np.load(source).dtype == np.uint16
        np.testing.assert_array_equal(np.load(source), stream)
        module = NumpyDataModule(train=source, window=17, stride=16, batch_size=4, shuffle="none", num_workers=1)
        module.setup("fit")
        batch = next(iter(module.train_dataloader()))
        [windows] = batch.values()
        expected = np.stack([stream[start : start + 17] for start in range(0, 64, 16)])
        np.testing.assert_array_equal(windows.numpy(), expected)
        module.teardown("fit")


def make_tokenizer(path):
    """A tokenizer of words, saved as Hugging Face does, which pads, cuts and adds tokens unless told not to."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "<eot>": 1, "two": 2, "words": 3, "end": 4, "<s>": 5}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 5)])
    tokenizer.enable_padding(length=8)
    tokenizer.enable_truncation(4)
    tokenizer.save(str(path))
    return tokenizer


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_hugging_face_tokenizer_gives_its_tokens_and_no_others(tmp_path, num_workers):
    make_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "in.jsonl").write_text('{"body": "two words two words two"}\n{"body": "end"}')
    manifest = convert(
        tmp_path / "in.jsonl",
        tmp_path / "out.h5",
        tokenizer=str(tmp_path / "tokenizer.json"),
        text_field="body",
        end_of_text="<eot>",
        num_workers=num_workers,
    )
    tokens = read_all(tmp_path / "out.h5")["tokens"]
    assert [document.tolist() for document in tokens] == [[2, 3, 2, 3, 2, 1], [4, 1]]
    assert manifest.fields == {"tokens": "ragged uint16"}


def test_a_column_of_a_table_is_tokenised(tmp_path):
    (tmp_path / "in.csv").write_text('id,body\n1,"two\nlines"\n2,b\n')
    convert(tmp_path / "in.csv", tmp_path / "out.h5", tokenizer="bytes", text_field="body", num_workers=0)
    tokens = read_all(tmp_path / "out.h5")["tokens"]
    assert [bytes(document.astype(np.uint8)) for document in tokens] == [b"two\nlines", b"b"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tokenizer": "gpt2"}, ConfigError, "expected 'bytes', a tokenizer.json"),
        ({"tokenizer": "missing/tokenizer.json"}, FileAccessError, "no such file"),
        ({"tokenizer": "in.json"}, ConfigError, "not a tokenizer.json"),
        ({"tokenizer": "tiktoken:no-such"}, ConfigError, "cannot be loaded"),
        ({"tokenizer": "bytes", "end_of_text": "<eot>"}, ConfigError, "no such token"),
        ({"end_of_text": 0}, ConfigError, "needs a tokenizer="),
        ({"size": (1, 1)}, ConfigError, "size: means nothing for text"),
    ],
)
def test_tokenizers_that_cannot_be_had_are_named(tmp_path, monkeypatch, options, error, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("a")
    (tmp_path / "in.json").write_text("{}")
    with pytest.raises(error, match=message):
        convert("in.txt", "out.h5", num_workers=0, **options)
    assert not (tmp_path / "out.h5").exists()


def test_a_folder_that_mixes_text_and_json_lines_is_refused(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    (folder / "b.jsonl").write_text("{}")
    with pytest.raises(FormatError, match="1 of 2 files are JSON Lines"):
        convert(folder, tmp_path / "out.h5", num_workers=0)


def test_metadata_opens_without_the_tokens(tmp_path):
    (tmp_path / "in.txt").write_text("a\nb")
    convert(tmp_path / "in.txt", tmp_path / "out", format="numpy", num_workers=0, shard_bytes=1)
    reader = open_reader(tmp_path / "out")
    assert reader.read([1])["text"] == ["b"]
    reader.close()
