"""Documents as they come: encodings, line ends, PDF, and what cannot be read."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pypdf import PdfReader, PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

from examples.patent_analysis import DISCLOSURE
from langchain_swarmkv.documents import reader
from langchain_swarmkv.errors import DocumentError


def read_document(path: Path) -> str:
    """The text alone; what is noticed on the way is tested in `test_plain_text`."""
    return reader.read_document(path, on_notice=lambda notice: None).page_content


FRENCH = (
    "Le procédé selon l'invention mesure la vibration du plancher à l'aide d'un capteur placé "
    "près du mur.\nIl détecte une chute dès que la force estimée dépasse un seuil préréglé, et "
    "prévient aussitôt un proche ou un médecin.\n"
)
CHINESE = (
    "本发明涉及一种利用地板振动检测老年人跌倒的系统。该系统包括传感器、激励器和控制器。\n"
    "控制器根据已知力的脉冲确定传递图。并根据传递图估计冲击力。\n"
)


def pdf_with_text(text: str) -> PdfWriter:
    """One page that shows one line of text in Helvetica."""
    writer = PdfWriter()
    page = writer.add_blank_page(width=400, height=200)
    font = DictionaryObject(
        {
            NameObject("/Type"): NameObject("/Font"),
            NameObject("/Subtype"): NameObject("/Type1"),
            NameObject("/BaseFont"): NameObject("/Helvetica"),
        }
    )
    fonts = DictionaryObject({NameObject("/F1"): font})
    page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
    content = DecodedStreamObject()
    content.set_data(f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET".encode("latin-1"))
    page[NameObject("/Contents")] = writer._add_object(content)
    return writer


def written(writer: PdfWriter, path: Path) -> Path:
    writer.write(path)
    return path


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "latin-1"])
@pytest.mark.parametrize("suffix", [".txt", ".md", ".TXT"])
def test_text_is_the_same_in_every_western_encoding(
    tmp_path: Path, encoding: str, suffix: str
) -> None:
    """The encoding of a file is found, and its byte order mark is no part of the text."""
    path = tmp_path / f"document{suffix}"
    path.write_bytes(FRENCH.encode(encoding))
    assert read_document(path) == FRENCH


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "gb18030"])
def test_text_is_the_same_in_every_chinese_encoding(tmp_path: Path, encoding: str) -> None:
    """GB18030 is told from the encodings of the West."""
    path = tmp_path / "document.txt"
    path.write_bytes(CHINESE.encode(encoding))
    assert read_document(path) == CHINESE


@pytest.mark.parametrize("line_end", ["\r\n", "\r", "\n"])
def test_lines_end_in_one_line_feed(tmp_path: Path, line_end: str) -> None:
    """A file from another system gives the same tokens."""
    path = tmp_path / "document.txt"
    path.write_bytes(f"first{line_end}{line_end}second{line_end}".encode())
    assert read_document(path) == "first\n\nsecond\n"


STRANGE = st.characters(exclude_categories=("Cc", "Cs"), exclude_characters="\ufeff")


@given(mark=st.sampled_from(["", "\ufeff"]), text=st.text(STRANGE, min_size=1).filter(str.strip))
def test_utf8_is_never_taken_for_something_else(
    tmp_path_factory: pytest.TempPathFactory, mark: str, text: str
) -> None:
    """However short and strange, a valid UTF-8 file is read as UTF-8, with a mark or without."""
    path = tmp_path_factory.getbasetemp() / "strange.txt"
    path.write_bytes((mark + text).encode())
    assert read_document(path) == text


def test_a_byte_order_mark_alone_is_no_text(tmp_path: Path) -> None:
    """What is left without it is an empty file."""
    path = tmp_path / "document.txt"
    path.write_bytes(b"\xef\xbb\xbf")
    with pytest.raises(DocumentError, match="empty"):
        read_document(path)


def test_a_pdf_gives_its_text(tmp_path: Path) -> None:
    """The text of the pages is found."""
    path = written(pdf_with_text("A sensing strip listens to the floor."), tmp_path / "a.pdf")
    assert "A sensing strip listens to the floor." in read_document(path)


def test_a_pdf_that_opens_without_a_password_is_read(tmp_path: Path) -> None:
    """Many PDFs are encrypted only to forbid printing."""
    writer = pdf_with_text("Open to all.")
    writer.encrypt(user_password="", owner_password="owner", algorithm="RC4-128")
    assert "Open to all." in read_document(written(writer, tmp_path / "a.pdf"))


def test_a_pdf_with_a_password_is_refused(tmp_path: Path) -> None:
    """The message says that it is encrypted."""
    writer = pdf_with_text("Secret.")
    writer.encrypt("password", algorithm="RC4-128")
    with pytest.raises(DocumentError, match="encrypted"):
        read_document(written(writer, tmp_path / "a.pdf"))


def test_a_pdf_of_scans_is_refused(tmp_path: Path) -> None:
    """Pages without text are told from an empty file, and OCR is named."""
    writer = PdfWriter()
    writer.add_blank_page(width=100, height=100)
    with pytest.raises(DocumentError, match="OCR"):
        read_document(written(writer, tmp_path / "a.pdf"))


@pytest.mark.parametrize("size", [0, 5, 200, 400])
def test_a_damaged_pdf_is_refused(tmp_path: Path, size: int) -> None:
    """A file cut short, or no PDF at all, fails with the one error type."""
    buffer = BytesIO()
    pdf_with_text("Cut short.").write(buffer)
    assert len(PdfReader(buffer).pages) == 1
    path = tmp_path / "a.pdf"
    path.write_bytes(buffer.getvalue()[:size])
    with pytest.raises(DocumentError, match=r"a\.pdf"):
        read_document(path)


@pytest.mark.parametrize("content", [b"", b" \n\t\r\n ", b"\xef\xbb\xbf", b"\xff\xfe"])
def test_a_blank_file_is_refused(tmp_path: Path, content: bytes) -> None:
    """Nothing to read is an error, not an empty document."""
    path = tmp_path / "blank.txt"
    path.write_bytes(content)
    with pytest.raises(DocumentError, match="empty"):
        read_document(path)


@pytest.mark.parametrize(
    "content",
    [
        b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + bytes(range(256)) * 4,
        b"GGUF\x03\x00\x00\x00" + bytes(64),
        b"\x7fELF\x02\x01\x01" + bytes(range(256)),
    ],
)
def test_a_binary_file_is_refused(tmp_path: Path, content: bytes) -> None:
    """A picture or a program with the suffix of a text is not fed to the model."""
    path = tmp_path / "binary.txt"
    path.write_bytes(content)
    with pytest.raises(DocumentError, match=r"is a (picture|program)|is a GGUF model"):
        read_document(path)


def test_notices_are_warnings_unless_somebody_listens(tmp_path: Path) -> None:
    """And they stay in the metadata."""
    path = tmp_path / "document.txt"
    path.write_bytes(FRENCH.encode("cp1252"))
    with pytest.warns(reader.DocumentWarning, match="guessed as cp1252"):
        document = reader.read_document(str(path))
    told: list[str] = []
    assert reader.read_document(path, on_notice=told.append) == document
    assert document.metadata == {"source": str(path), "encoding": "cp1252", "notices": told}


def test_an_encoding_that_is_given_decides(tmp_path: Path) -> None:
    """Nothing is guessed then; a name that is none, and one for a PDF, are refused."""
    path = tmp_path / "document.txt"
    path.write_bytes("Kündigung".encode("cp1252"))
    told: list[str] = []
    document = reader.read_document(path, encoding="iso8859-5", on_notice=told.append)
    assert (document.page_content, told) == ("Kќndigung", [])
    for wrong in ("klingon", "hex", "rot13"):
        with pytest.raises(DocumentError, match=f"no encoding '{wrong}'"):
            reader.read_document(path, encoding=wrong)
    pdf = written(pdf_with_text("Text."), tmp_path / "a.pdf")
    with pytest.raises(DocumentError, match="no encoding"):
        reader.read_document(pdf, encoding="utf-8")


def test_an_error_says_which_file_and_why(tmp_path: Path) -> None:
    """As attributes too; it is bad input, which LangGraph does not try again."""
    with pytest.raises(DocumentError) as caught:
        reader.read_document(tmp_path / "missing.txt")
    assert caught.value.facts["path"] == tmp_path / "missing.txt"
    assert caught.value.facts["reason"] == "No such file or directory"
    assert isinstance(caught.value, ValueError)


def test_an_unknown_suffix_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    """The message lists what can be read."""
    path = tmp_path / "document.docx"
    path.write_text("text")
    with pytest.raises(DocumentError, match=r"'\.docx'.*\.txt, \.md, \.pdf"):
        read_document(path)


@pytest.mark.parametrize("suffix", [".txt", ".pdf"])
def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path, suffix: str) -> None:
    """The system's own words tell which it is."""
    folder = tmp_path / f"folder{suffix}"
    folder.mkdir()
    with pytest.raises(DocumentError, match="No such file"):
        read_document(tmp_path / f"missing{suffix}")
    with pytest.raises(DocumentError, match="directory"):
        read_document(folder)


def test_the_disclosure_is_a_patent_disclosure() -> None:
    """It ships beside the reader, has the usual parts, and names figures in order."""
    text = read_document(DISCLOSURE)
    for heading in ("Field", "Background", "Summary of the invention", "Detailed", "Claims"):
        assert f"\n## {heading}" in text
    assert text.index("Figure 1") < text.index("Figure 2")
    assert "Figure 3" not in text
