"""HDF5: types, layouts, links and row counts as they occur in files of others."""

from __future__ import annotations

import logging
import sys

import h5py
import numpy as np
import pytest
import scipy.sparse
import torch

from lightning_fastio.errors import ConfigError, CorruptFileError, FileAccessError, FormatError, SchemaError
from lightning_fastio.formats import open_reader, open_writer
from lightning_fastio.formats.hdf5.chunks import fletcher32

ROWS = [3, 0, -1, 3, 1]


@pytest.fixture
def make(tmp_path):
    """Write a file with a function, and give its path."""

    def make(fill, name="data.h5", **options):
        with h5py.File(tmp_path / name, "w", **options) as file:
            fill(file)
        return tmp_path / name

    return make


def read_paths(reader):
    return {layout.name: layout.read_path for layout in reader.layout()}


# Types


def test_compound_members_are_fields_of_their_own(make):
    dtype = np.dtype([("energy", ">f4"), ("hit", "<i4", (2,)), ("name", "S3"), ("at", [("x", "<f8"), ("flag", "?")])])
    table = np.zeros(20, dtype)
    table["energy"], table["hit"] = np.arange(20), np.arange(40).reshape(20, 2)
    table["name"], table["at"]["x"], table["at"]["flag"] = [b"ab"] * 10 + [b"xyz"] * 10, np.arange(20) / 2, True
    path = make(lambda file: file.create_dataset("table", data=table, chunks=(6,), compression="gzip"))
    reader = open_reader(path)
    assert list(reader.schema) == ["table.energy", "table.hit", "table.name", "table.at.x", "table.at.flag"]
    batch = reader.read(ROWS)
    np.testing.assert_array_equal(batch["table.energy"], table["energy"][ROWS].astype("f4"))
    np.testing.assert_array_equal(batch["table.hit"], table["hit"][ROWS])
    assert batch["table.name"] == ["ab", "ab", "xyz", "ab", "ab"]
    np.testing.assert_array_equal(batch["table.at.x"], table["at"]["x"][ROWS])
    assert batch["table.at.flag"].dtype == torch.bool
    named = open_reader(path, {"hits": "table.hit", "e": "table.energy"})
    np.testing.assert_array_equal(named.read(ROWS)["hits"], table["hit"][ROWS])
    with pytest.raises(FormatError, match=r"holds records; name their members: 'table.energy', 'table.hit'"):
        open_reader(path, ["table"])
    with pytest.raises(SchemaError, match=r"'table\.mass': its records have 'energy'"):
        open_reader(path, ["table.mass"])


def test_a_dataset_with_a_dot_in_its_name_comes_before_a_member(make):
    def fill(file):
        file["a"] = np.zeros(3, [("x", "<f4")])
        file["a.x"] = np.arange(3.0)

    reader = open_reader(make(fill), ["a.x"])
    np.testing.assert_array_equal(reader.read([2, 1])["a.x"], [2.0, 1.0])


def test_array_types_extend_the_sample(make):
    data = np.arange(24, dtype="<i4").reshape(4, 2, 3)

    def fill(file):
        dataset = file.create_dataset("a", (4,), np.dtype(("<i4", (2, 3))))
        dataset[...] = data

    reader = open_reader(make(fill))
    assert reader.schema["a"].shape == (2, 3)
    np.testing.assert_array_equal(reader.read(ROWS)["a"], data[ROWS])


def test_types_that_numpy_reports_but_the_disk_has_not(make):
    """bfloat16, bit fields and short floats are stored otherwise than h5py's dtype says, so they are not mapped."""

    def fill(file):
        space = h5py.h5s.create_simple((4,))
        bfloat16 = h5py.h5t.IEEE_F32LE.copy()
        bfloat16.set_fields(15, 7, 8, 0, 7)
        bfloat16.set_precision(16)
        bfloat16.set_size(2)
        h5py.h5d.create(file.id, b"bfloat16", bfloat16, space)
        h5py.h5d.create(file.id, b"bits", h5py.h5t.STD_B8LE, space)
        file["bfloat16"][...] = [1.5, -2.0, 0.25, 8.0]
        file["bits"][...] = np.array([1, 2, 3, 255], np.uint8)

    reader = open_reader(make(fill))
    batch = reader.read(ROWS)
    assert batch["bfloat16"].tolist() == [8.0, 1.5, 8.0, 8.0, -2.0]
    assert batch["bits"].tolist() == [255, 1, 255, 255, 2]
    assert set(read_paths(reader).values()) == {"h5py"}


def test_n_bit_integers_go_through_the_library(make):
    def fill(file):
        type_ = h5py.h5t.STD_I32LE.copy()
        type_.set_precision(12)
        type_.set_offset(4)
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((3,))
        plist.set_filter(h5py.h5z.FILTER_NBIT, h5py.h5z.FLAG_MANDATORY)
        try:
            h5py.h5d.create(file.id, b"n", type_, h5py.h5s.create_simple((4,)), plist)
        except ValueError as error:
            pytest.skip(f"this HDF5 writes no such type: {error}")
        file["n"][...] = [100, -200, 300, -400]

    assert open_reader(make(fill)).read(ROWS)["n"].tolist() == [-400, 100, -400, -400, -200]


def test_stored_booleans_other_than_0_and_1(make, tmp_path):
    path = make(lambda file: file.create_dataset("m", data=np.array([True, False, True, False])))
    with h5py.File(path) as file:
        offset = file["m"].id.get_offset()
    raw = bytearray(path.read_bytes())
    raw[offset : offset + 4] = b"\x02\x00\xff\x01"
    path.write_bytes(raw)
    mask = open_reader(path).read([0, 1, 2, 3])["m"]
    assert mask.view(torch.uint8).tolist() == [1, 0, 1, 1]


def test_unsigned_integers_are_widened_or_kept(make):
    large = np.array([0, 2**63], np.uint64)

    def fill(file):
        file["u2"] = np.array([1, 65535], np.uint16)
        file["u4"] = np.array([1, 2**32 - 1], np.uint32)
        file["u8"] = np.array([1, 2**63 - 1], np.uint64)
        file["large"] = large

    path = make(fill)
    batch = open_reader(path, ["u2", "u4", "u8"]).read([1])
    assert {name: (values.dtype, values.item()) for name, values in batch.items()} == {
        "u2": (torch.int32, 65535),
        "u4": (torch.int64, 2**32 - 1),
        "u8": (torch.int64, 2**63 - 1),
    }
    with pytest.raises(FormatError, match=r"data.h5.* row 1: 9223372036854775808 is too large for int64"):
        open_reader(path, ["large"]).read([0, 1])
    kept = open_reader(path, ["u2", "large"], widen_unsigned=False).read([1])
    assert kept["u2"].dtype == torch.uint16
    np.testing.assert_array_equal(kept["large"].numpy(), large[1:])


def test_text_fixed_variable_and_padded_with_spaces(make):
    def fill(file):
        file.create_dataset("v", data=["a", "bé", "c"], dtype=h5py.string_dtype())
        file.create_dataset("f", data=np.array([b"a", "bé".encode(), b"c"], "S4"))
        padded = h5py.h5t.C_S1.copy()
        padded.set_size(4)
        padded.set_strpad(h5py.h5t.STR_SPACEPAD)
        h5py.h5d.create(file.id, b"p", padded, h5py.h5s.create_simple((3,)))
        file["p"][...] = np.array([b"a", b"bc", b"d"], "S4")

    batch = open_reader(make(fill)).read([2, 1, 0])
    assert batch == {"f": ["c", "bé", "a"], "p": ["d", "bc", "a"], "v": ["c", "bé", "a"]}


def test_text_that_is_not_utf8_is_an_error_with_its_row(make):
    path = make(lambda file: file.create_dataset("t", data=np.array([b"ok", b"\xff\xfe"], "S2")))
    with pytest.raises(FormatError, match=r"dataset '/t', rows 0 to 1: row 1: b'\\xff\\xfe' is not UTF-8"):
        open_reader(path).read([0])


@pytest.mark.parametrize("policy", ["auto", "list", "pad", "error"])
def test_rows_of_varying_length(make, policy):
    rows = [[1, 2], [3], []]

    def fill(file):
        dataset = file.create_dataset("v", (3,), h5py.vlen_dtype(">i4"))
        for index, row in enumerate(rows):
            dataset[index] = row

    path = make(fill)
    if policy == "error":
        with pytest.raises(FormatError, match="differ in length, and ragged='error' refuses them"):
            open_reader(path, ["v"], ragged=policy)
        return
    batch = open_reader(path, ragged=policy).read([0, 2, 1])["v"]
    if policy == "pad":
        assert batch.tolist() == [[1, 2], [0, 0], [3, 0]]
    else:
        assert [(row.dtype, row.tolist()) for row in batch] == [(torch.int32, each) for each in ([1, 2], [], [3])]


def test_types_without_meaning_are_refused_by_name(make, caplog):
    def fill(file):
        file["x"] = np.arange(3.0)
        file["opaque"] = np.zeros(3, "V5")
        file["long"] = np.zeros(3, np.longdouble)
        file.create_dataset("references", (3,), h5py.ref_dtype)
        file.create_dataset("texts", (3, 2), h5py.string_dtype())
        file.create_dataset("lists", (3, 2), h5py.vlen_dtype("f4"))

    path = make(fill)
    with caplog.at_level(logging.WARNING, "lightning_fastio"):
        assert list(open_reader(path).schema) == ["x"]
    (notice,) = caplog.messages
    for name in ("opaque", "long", "references", "texts", "lists"):
        assert f"{name!r}: " in notice
        with pytest.raises(FormatError, match=f"field '{name}' cannot be loaded: "):
            open_reader(path, [name])
    assert notice.endswith("Taken: fields=['x']")


# Layouts


def test_filter_masks_are_honoured(make):
    """Chunks whose writer skipped the filters, as old writers did where compression gained nothing."""
    data = np.arange(40, dtype="<i4").reshape(10, 4)

    def fill(file):
        dataset = file.create_dataset("x", (10, 4), "<i4", chunks=(5, 4), compression="gzip", shuffle=True)
        dataset[...] = data
        dataset.id.write_direct_chunk((0, 0), data[:5].tobytes(), filter_mask=0b11)
        plain = np.frombuffer(data[5:].tobytes(), np.uint8).reshape(-1, 4).T.tobytes()
        dataset.id.write_direct_chunk((5, 0), plain, filter_mask=0b10)

    reader = open_reader(make(fill))
    assert read_paths(reader) == {"x": "raw chunks decoded in threads"}
    np.testing.assert_array_equal(reader.read(ROWS)["x"], data[ROWS])
    np.testing.assert_array_equal(reader.read(range(10))["x"], data)


def test_partial_edge_chunks_stored_without_their_filters(make):
    """The mask of such a chunk is 0 all the same."""
    data = np.arange(35, dtype="<i4").reshape(7, 5)

    def fill(file):
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((4, 5))
        plist.set_shuffle()
        plist.set_deflate(4)
        dataset = file.create_dataset("x", (7, 5), "<i4", chunks=(4, 5), compression="gzip", shuffle=True)
        dataset[...] = data
        # What HDF5 does under H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS, except that the option tells it to read it so.
        dataset.id.write_direct_chunk((4, 0), np.vstack([data[4:], data[:1] * 0]).tobytes(), filter_mask=0b11)

    path = make(fill)
    reader = open_reader(path)
    reader._paths[0].source._read_rows._index.masks[:] = 0
    np.testing.assert_array_equal(reader.read(range(7))["x"], data)


def test_a_single_unlimited_axis_that_is_not_the_first(make):
    """HDF5 gives wrong chunk positions there, in files of the 1.10 format."""
    data = np.arange(7 * 12).reshape(7, 12)
    path = make(
        lambda file: file.create_dataset("x", data=data, chunks=(3, 4), maxshape=(7, None), compression="gzip"),
        libver="latest",
    )
    reader = open_reader(path)
    assert read_paths(reader) == {
        "x": "h5py (HDF5 misplaces chunks where one axis is unlimited and it is not the first)"
    }
    np.testing.assert_array_equal(reader.read(ROWS)["x"], data[ROWS])


@pytest.mark.parametrize("dtype", ["u1", "<f4", ">i8", "<c16"])
def test_filters_without_optional_packages(make, monkeypatch, dtype):
    data = np.arange(70).reshape(10, 7).astype(dtype)
    filters = {"compression": "gzip", "shuffle": True, "fletcher32": True}
    path = make(lambda file: file.create_dataset("x", data=data, chunks=(3, 7), **filters))
    for package in ("isal", "isal.isal_zlib", "numcodecs"):
        monkeypatch.setitem(sys.modules, package, None)
    reader = open_reader(path)
    assert read_paths(reader) == {"x": "raw chunks decoded in threads"}
    np.testing.assert_array_equal(reader.read(ROWS)["x"], data[ROWS])


@pytest.mark.parametrize("compression", ["lz4", "zstd", "blosc"])
def test_plugins_decode_outside_of_the_library(tmp_path, compression):
    """Both what compresses and what does not, in more than one block of the codec."""
    data = np.random.default_rng(0).integers(0, 256, (6, 1 << 20)).astype(np.uint8)
    data[::2] = 7
    with open_writer(tmp_path / "x.h5", compression=compression, rows_per_block=2) as writer:
        writer.write({"x": data})
    reader = open_reader(tmp_path / "x.h5")
    assert read_paths(reader) == {"x": "raw chunks decoded in threads"}
    np.testing.assert_array_equal(reader.read([5, 0, 3])["x"], data[[5, 0, 3]])
    reader.close()


@pytest.mark.parametrize("swapped", [False, True], ids=["now", "before 1.6.3"])
def test_fletcher32_finds_damage(make, swapped):
    data = np.arange(100, dtype="<u2")
    path = make(lambda file: file.create_dataset("x", data=data, chunks=(100,), fletcher32=True))
    with h5py.File(path) as file:
        info = file["x"].id.get_chunk_info(0)
    raw = bytearray(path.read_bytes())
    end = info.byte_offset + info.size
    assert int.from_bytes(raw[end - 4 : end], "little") == fletcher32(data.tobytes())
    if swapped:
        raw[end - 4 : end] = bytes(raw[end - 4 + index] for index in (1, 0, 3, 2))
        path.write_bytes(raw)
    assert open_reader(path).read([99])["x"].item() == 99
    raw[info.byte_offset + 10] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CorruptFileError, match=r"dataset '/x', rows 0 to 99: .* fletcher32 checksum"):
        open_reader(path).read([99])


@pytest.mark.parametrize("num_bytes", [0, 1, 2, 7, 131074])
def test_fletcher32_is_that_of_the_library(make, num_bytes):
    data = np.random.default_rng(0).integers(0, 256, max(1, num_bytes)).astype(np.uint8)
    path = make(lambda file: file.create_dataset("x", data=data, chunks=data.shape, fletcher32=True))
    with h5py.File(path) as file:
        _, chunk = file["x"].id.read_direct_chunk((0,))
    assert int.from_bytes(chunk[-4:], "little") == fletcher32(data.tobytes())


def test_damaged_gzip_is_an_error_with_its_place(make):
    data = np.random.default_rng(0).normal(size=(6, 50))
    path = make(lambda file: file.create_dataset("x", data=data, chunks=(2, 50), compression="gzip"))
    with h5py.File(path) as file:
        info = file["x"].id.get_chunk_info(1)
    raw = bytearray(path.read_bytes())
    raw[info.byte_offset + 30] ^= 0xFF
    path.write_bytes(raw)
    with pytest.raises(CorruptFileError, match=rf"data.h5: dataset '/x', rows .*at byte {info.byte_offset} is damaged"):
        open_reader(path).read([2])


def test_compact_and_external_and_virtual(make, tmp_path):
    data = np.arange(20.0).reshape(10, 2)

    def fill(file):
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.COMPACT)
        h5py.h5d.create(file.id, b"compact", h5py.h5t.IEEE_F64LE, h5py.h5s.create_simple((10, 2)), plist)
        file["compact"][...] = data
        file.create_dataset("external", data=data, external=[(str(tmp_path / "raw.bin"), 0, data.nbytes)])

    source = make(fill)

    def fill_virtual(file):
        layout = h5py.VirtualLayout((10, 2), "f8")
        layout[...] = h5py.VirtualSource(source.name, "compact", shape=(10, 2))
        file.create_virtual_dataset("virtual", layout)

    virtual = make(fill_virtual, "virtual.h5")
    for path, name in ((source, "compact"), (source, "external"), (virtual, "virtual")):
        reader = open_reader(path, [name])
        np.testing.assert_array_equal(reader.read(ROWS)[name], data[ROWS])
        assert read_paths(reader) == {name: "h5py"}
        reader.close()
    (tmp_path / "raw.bin").rename(tmp_path / "gone.bin")
    with pytest.raises(FileAccessError, match=r"external dataset '/external' are in '.*raw.bin', a file that is miss"):
        open_reader(source, ["external"])
    source.rename(tmp_path / "gone.h5")
    with pytest.raises(FileAccessError, match=r"virtual dataset '/virtual' are in 'data.h5', a file that is missing"):
        open_reader(virtual, ["virtual"])


def test_external_raw_data_is_found_beside_the_file(make, tmp_path, monkeypatch):
    data = np.arange(8.0)
    monkeypatch.chdir(tmp_path)
    make(lambda file: file.create_dataset("x", data=data, external=[("raw.bin", 0, data.nbytes)]))
    monkeypatch.chdir("/")
    np.testing.assert_array_equal(open_reader(tmp_path / "data.h5").read([7, 1])["x"], [7.0, 1.0])


def test_links_and_nested_groups(make):
    data = np.arange(12.0).reshape(6, 2)
    make(lambda file: file.create_dataset("far/away", data=data), "other.h5")

    def fill(file):
        file["images/train"] = data
        file["alias"] = h5py.SoftLink("/images/train")
        file["outside"] = h5py.ExternalLink("other.h5", "/far/away")
        file["loop/back"] = h5py.SoftLink("/")

    path = make(fill)
    reader = open_reader(path)
    assert list(reader.schema) == ["alias", "images/train", "outside"]
    assert set(read_paths(reader).values()) == {"memory map"}
    for values in reader.read(ROWS).values():
        np.testing.assert_array_equal(values, data[ROWS])
    np.testing.assert_array_equal(open_reader(path, ["/images/train"]).read(ROWS)["images/train"], data[ROWS])


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("chunks", [None, (4, 3)])
def test_user_blocks(make, libver, chunks):
    data = np.arange(30.0).reshape(10, 3)
    path = make(lambda file: file.create_dataset("x", data=data, chunks=chunks), libver=libver, userblock_size=1024)
    np.testing.assert_array_equal(open_reader(path).read(ROWS)["x"], data[ROWS])


def test_a_file_of_gigabytes_of_nothing_opens_at_once(make):
    def fill(file):
        file.create_dataset("x", (2**34, 16), "f4", chunks=(1, 16))
        file.create_dataset("y", (2**34,), "i8", chunks=(2**20,), fillvalue=7)
        file["y"][5] = 1

    reader = open_reader(make(fill))
    assert len(reader) == 2**34
    batch = reader.read([2**34 - 1, 5])
    assert batch["x"].abs().sum() == 0
    assert batch["y"].tolist() == [7, 1]
    reader.close()


# Which fields


def test_the_row_count_with_the_most_bytes_is_taken(make, caplog):
    def fill(file):
        file["images"] = np.zeros((50, 8, 8), np.uint8)
        file["labels"] = np.arange(50)
        file["mean"] = np.zeros((8, 8))
        file["scale"] = 2.0

    path = make(fill)
    with caplog.at_level(logging.WARNING, "lightning_fastio"):
        assert list(open_reader(path).schema) == ["images", "labels"]
    assert caplog.messages == [
        f"{path}: left out 'scale': it is a single value without rows; 'mean': it has 8 rows, not 50. "
        "Taken: fields=['images', 'labels']"
    ]
    with pytest.raises(SchemaError, match="'images' has 50, 'mean' has 8"):
        open_reader(path, ["images", "mean"])


def test_unknown_fields_and_groups(make):
    path = make(lambda file: file.create_dataset("train/images", data=np.zeros((3, 2))))
    with pytest.raises(SchemaError, match="no dataset 'train/image'; the file has 'train/images'"):
        open_reader(path, ["train/image"])
    with pytest.raises(FormatError, match="'train' is a group; name a dataset in it: 'train/images'"):
        open_reader(path, ["train"])


def test_fields_renamed_and_stacked(make):
    def fill(file):
        file["f0"], file["f1"] = np.arange(5.0), np.arange(5.0) * 10

    reader = open_reader(make(fill), {"x": ["f1", "f0"], "z": "f0"})
    assert reader.read([4, 1])["x"].tolist() == [[40.0, 4.0], [10.0, 1.0]]


def test_netcdf4_dimensions_are_left_out_and_matlab_is_told(make, caplog):
    def fill(file):
        file["temperature"] = np.zeros((4, 3))
        file["time"] = np.zeros(4)
        file["time"].make_scale("This is a netCDF dimension but not a netCDF variable.         4")
        file["temperature"].dims[0].attach_scale(file["time"])

    with caplog.at_level(logging.WARNING, "lightning_fastio"):
        assert list(open_reader(make(fill, "a.nc")).schema) == ["temperature"]
    assert caplog.messages == []
    path = make(lambda file: file.create_dataset("x", data=np.zeros((4, 3))), "m.mat", userblock_size=512)
    with path.open("r+b") as file:
        file.write(b"MATLAB 7.3 MAT-file, Platform: GLNXA64")
    with caplog.at_level(logging.WARNING, "lightning_fastio"):
        assert len(open_reader(path)) == 4
    assert "axes reversed" in caplog.text


# Sparse matrices


@pytest.fixture
def matrix():
    return scipy.sparse.random(30, 12, 0.2, "csr", dtype=np.float32, rng=np.random.default_rng(0))


@pytest.mark.parametrize("filters", [{}, {"compression": "gzip", "chunks": (10,)}], ids=["mapped", "blocks"])
def test_csr_groups_dense_and_sparse(make, matrix, filters):
    def fill(file):
        group = file.create_group("X")
        group.attrs["encoding-type"], group.attrs["shape"] = "csr_matrix", matrix.shape
        for name in ("data", "indices", "indptr"):
            group.create_dataset(name, data=getattr(matrix, name), **filters)
        file["obs/label"] = np.arange(30)

    path = make(fill)
    rows = [29, 3, 3, -2, 0]
    dense = open_reader(path, ["X", "obs/label"])
    np.testing.assert_array_equal(dense.read(rows)["X"], matrix.toarray()[rows])
    sparse = open_reader(path, sparse=True)
    assert sparse.schema["X"].kind == "sparse"
    batch = sparse.read(rows)
    assert batch["X"].layout == torch.sparse_csr
    np.testing.assert_array_equal(batch["X"].to_dense(), matrix.toarray()[rows])
    assert batch["obs/label"].tolist() == [29, 3, 3, 28, 0]
    assert sparse.read([])["X"].shape == (0, 12)
    for reader in (dense, sparse):
        reader.will_need(rows)
        reader.close()


def test_10x_columns_are_cells(make, matrix):
    def fill(file):
        group = file.create_group("matrix")
        for name in ("data", "indices", "indptr"):
            group[name] = getattr(matrix, name)
        group["shape"] = np.array([12, 30])

    reader = open_reader(make(fill))
    assert len(reader) == 30
    np.testing.assert_array_equal(reader.read([5, 1])["matrix"], matrix.toarray()[[5, 1]])


def test_sparse_groups_that_do_not_fit_together(make, matrix):
    def fill(encoding, shape, indptr):
        def fill(file):
            group = file.create_group("X")
            group.attrs["encoding-type"], group.attrs["shape"] = encoding, shape
            group["data"], group["indices"], group["indptr"] = matrix.data, matrix.indices, indptr

        return fill

    with pytest.raises(FormatError, match=r"stored by columns \(csc\).*tocsr"):
        open_reader(make(fill("csc_matrix", (12, 30), matrix.indptr)), ["X"])
    with pytest.raises(CorruptFileError, match=r"shape \(31, 12\), but 31 row starts"):
        open_reader(make(fill("csr_matrix", (31, 12), matrix.indptr)), ["X"])
    with pytest.raises(CorruptFileError, match="indptr does not rise"):
        open_reader(make(fill("csr_matrix", (30, 12), matrix.indptr[::-1])), ["X"])
    with pytest.raises(CorruptFileError, match="column number outside 0 to 2"):
        open_reader(make(fill("csr_matrix", (30, 3), matrix.indptr)), ["X"]).read([0, 1, 2, 3])


# Many files, options, writer


def test_shards_share_one_cache_and_skip_those_without_rows(tmp_path):
    for number, num_rows in enumerate([10, 0, 7]):
        with open_writer(tmp_path / f"part-{number}.h5", compression="gzip", rows_per_block=4) as writer:
            writer.write({"x": np.full((num_rows, 300, 20), number, np.float64), "y": np.arange(num_rows)})
    reader = open_reader(tmp_path, cache_bytes=1 << 20)
    assert len(reader) == 17
    assert reader.cache_bytes == 1 << 20
    batch = reader.read([16, 0, 10, 9])
    assert batch["x"][:, 0, 0].tolist() == [2.0, 0.0, 2.0, 0.0]
    assert batch["y"].tolist() == [6, 0, 0, 9]
    reader.close()


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
    "layouts",
    [
        [{}, {}],
        [{"chunks": (4, 2)}, {"chunks": (5, 2)}],
        [{}, {"chunks": (4, 2)}],
        [{"chunks": (4, 1)}, {"chunks": (3, 2), "compression": "gzip"}],
    ],
    ids=["contiguous", "chunked", "mixed", "decoded"],
)
def test_shards_of_any_layout(make, layouts, window):
    shards = [np.arange(24.0).reshape(12, 2), np.arange(20.0).reshape(10, 2) + 100]
    paths = [
        make(lambda file: file.create_dataset("x", data=data, **layout), f"{number}.h5")  # noqa: B023
        for number, (data, layout) in enumerate(zip(shards, layouts, strict=True))
    ]
    reader = open_reader(paths, window=window, stride=window and 2)
    if window:
        shards = [np.stack([data[at : at + 3] for at in range(0, len(data) - 2, 2)]) for data in shards]
    right = np.concatenate(shards)
    rows = np.random.default_rng(0).integers(-len(right), len(right), 40)
    reader.will_need(rows)
    np.testing.assert_array_equal(reader.read(rows)["x"], right[rows])
    reader.close()


def test_shards_of_records_text_and_sparse_rows(make, matrix):
    def fill(offset):
        def fill(file):
            table = np.zeros(30, [("a", "<i4"), ("b", ">f8")])
            table["a"], table["b"] = np.arange(30) + offset, np.arange(30) / 4
            file["table"] = table
            file["text"] = [f"row {index + offset}" for index in range(30)]
            group = file.create_group("X")
            group.attrs["encoding-type"], group.attrs["shape"] = "csr_matrix", matrix.shape
            for name in ("data", "indices", "indptr"):
                group[name] = getattr(matrix, name)

        return fill

    paths = [make(fill(offset), f"{offset}.h5") for offset in (0, 30)]
    rows = [59, 0, 30, 29, 29]
    for sparse in (False, True):
        batch = open_reader(paths, ["table.a", "table.b", "text", "X"], sparse=sparse).read(rows)
        assert batch["table.a"].tolist() == rows
        assert batch["table.b"].tolist() == [7.25, 0.0, 0.0, 7.25, 7.25]
        assert batch["text"] == [f"row {row}" for row in rows]
        dense = batch["X"].to_dense() if sparse else batch["X"]
        np.testing.assert_array_equal(dense, matrix.toarray()[np.array(rows) % 30])


def test_windows_need_rows_of_one_shape(make):
    path = make(lambda file: file.create_dataset("t", data=["a", "b"]))
    with pytest.raises(FormatError, match="window= takes rows of numbers of one shape, but 't' is string"):
        open_reader(path, ["t"], window=2)
    with pytest.raises(ConfigError, match="stride=2 needs window="):
        open_reader(path, stride=2)


def test_labels_beside_mapped_images_leave_the_reader_without_blocks(make):
    def fill(file):
        file["images"] = np.zeros((300, 64, 64), np.uint8)
        file.create_dataset("labels", data=np.arange(300), chunks=(10,), compression="gzip")

    reader = open_reader(make(fill))
    assert reader.blocks is None
    assert reader.read([299, 4])["labels"].tolist() == [299, 4]
    reader.close()


def test_long_rows_that_lie_alone_cost_the_same_in_any_order(tmp_path):
    rng = np.random.default_rng(0)
    pictures = [rng.bytes(int(length)) for length in rng.integers(20_000, 60_000, 200)]
    with open_writer(tmp_path / "x.h5") as writer:
        writer.write({"picture": pictures, "label": np.arange(200)})
    reader = open_reader(tmp_path / "x.h5", cache_bytes=1 << 20)
    assert reader.blocks is None
    reader.will_need([3, 199])
    assert reader.read([199, 3, 0])["picture"] == [pictures[199], pictures[3], pictures[0]]
    assert {layout.name: layout.stored for layout in reader.layout()} == {
        "picture": "rows of varying length of uint8 (200,), chunks (200,)",
        "label": "int64 (200,), chunks (200,)",
    }
    reader.close()


def test_what_the_writer_lays_out(tmp_path):
    with open_writer(tmp_path / "x.h5", block_bytes=4096, metadata={"classes": '["a"]'}) as writer:
        for start in range(0, 100, 7):
            rows = np.arange(start, min(start + 7, 100))
            writer.write({"image": np.tile(rows[:, None, None], (1, 8, 16)).astype(np.float32), "label": rows})
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["image"].chunks == (8, 8, 16)
        assert file["label"].chunks == (100,)
        np.testing.assert_array_equal(file["image"][:, 3, 5], np.arange(100))
    assert open_reader(tmp_path / "x.h5").metadata == {"classes": '["a"]'}


def test_what_the_writer_refuses(tmp_path):
    with pytest.raises(ConfigError, match="compression='rar' is unknown; use gzip"):
        open_writer(tmp_path / "x.h5", compression="rar")
    for value, message in (
        (torch.zeros(2, dtype=torch.bfloat16), "HDF5 has no bfloat16"),
        (["a\0b"], "HDF5 cannot store them"),
    ):
        with pytest.raises(SchemaError, match=message), open_writer(tmp_path / "x.h5") as writer:
            writer.write({"x": value})
    assert list(tmp_path.iterdir()) == []
    writer = open_writer(tmp_path / "x.h5")
    writer.write({"x": np.zeros(2, np.float32)})
    with pytest.raises(SchemaError, match="field 'x' began as tensor of float32"):
        writer.write({"x": np.zeros(2, np.float64)})
    writer.abort()
    assert list(tmp_path.iterdir()) == []
