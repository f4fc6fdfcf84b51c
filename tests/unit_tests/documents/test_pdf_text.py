"""PDFs whose text layer is one, and those whose text layer is none."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from pypdf import PdfReader, PdfWriter

from langchain_swarmkv.documents import pdf_text as module
from langchain_swarmkv.documents.pdf_text import pdf_text
from langchain_swarmkv.documents.plain_text import Unreadable

SENTENCE = "The notice period is three months. "

SIMPLE = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
DESCENDANT = (
    b"<< /Type /Font /Subtype /CIDFontType2 /BaseFont /AAAAAA+Arial /DW 600 "
    b"/CIDSystemInfo << /Registry (Adobe) /Ordering (Identity) /Supplement 0 >> >>"
)
SQUARE = b"q 90 0 0 90 0 0 cm BI /W 1 /H 1 /CS /G /BPC 8 ID \x80 EI Q"


def pdf(path: Path, contents: Sequence[bytes], font: bytes = SIMPLE, *more: bytes) -> Path:
    """A file with a page for each content; `more` are objects 5, 6, ... that the font names."""
    pages = range(5 + len(more), 5 + len(more) + 2 * len(contents), 2)
    kids = b" ".join(b"%d 0 R" % page for page in pages)
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, len(contents)),
        font,
        b"<< /Font << /F1 3 0 R >> >>",
        *more,
    ]
    for page, content in zip(pages, contents, strict=True):
        objects += [
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 400 200] /Resources 4 0 R "
            b"/Contents %d 0 R >>" % (page + 1),
            stream(content),
        ]
    data = b"%PDF-1.7\n"
    offsets = []
    for number, body in enumerate(objects, start=1):
        offsets.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    size = len(objects) + 1
    path.write_bytes(
        data
        + b"xref\n0 %d\n0000000000 65535 f \n%s" % (size, table)
        + b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % (size, len(data))
    )
    return path


def stream(data: bytes) -> bytes:
    return b"<< /Length %d >>\nstream\n%s\nendstream" % (len(data), data)


def shown(text: str) -> bytes:
    return f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET".encode("latin-1")


def glyphs(text: str, offset: int = -29) -> bytes:
    """Numbers of glyphs, as TrueType fonts have them: 3 is the space, 36 is A."""
    codes = "".join(f"{ord(character) + offset:04X}" for character in text)
    return f"BT /F1 12 Tf 20 100 Td <{codes}> Tj ET".encode()


def composite(path: Path, contents: Sequence[bytes], target: str | None = None) -> Path:
    """A font of glyph numbers; `target`: the character, in hex, that the map has for the space."""
    font = b"<< /Type /Font /Subtype /Type0 /BaseFont /AAAAAA+Arial /Encoding /Identity-H "
    font += b"/DescendantFonts [5 0 R] %s>>" % (b"/ToUnicode 6 0 R " if target else b"")
    lines = [f"<{ord(c) - 29:04X}> <{int(target or '0', 16):04X}>" for c in sorted(set(SENTENCE))]
    if target == "0020":
        lines = [f"<{ord(c) - 29:04X}> <{ord(c):04X}>" for c in sorted(set(SENTENCE))]
    mapping = "\n".join(lines)
    cmap = (
        "/CIDInit /ProcSet findresource begin 12 dict begin begincmap /CMapName /X def "
        "1 begincodespacerange <0000> <FFFF> endcodespacerange\n"
        f"{len(lines)} beginbfchar\n{mapping}\nendbfchar\nendcmap end end"
    )
    return pdf(path, contents, font, DESCENDANT, stream(cmap.encode()))


def test_glyph_numbers_with_a_map_are_text(tmp_path: Path) -> None:
    """The usual case."""
    path = composite(tmp_path / "a.pdf", [glyphs(SENTENCE)], "0020")
    read = pdf_text(path)
    assert (read.text, read.notices) == (SENTENCE.strip(), ())


def test_glyph_numbers_without_a_map_are_refused(tmp_path: Path) -> None:
    """Also where they happen to be printable: `7KH` for `The`, with spaces by position."""
    words = b" ".join(glyphs(word) for word in SENTENCE.split())
    for content in (glyphs(SENTENCE), words):
        path = composite(tmp_path / "a.pdf", [content])
        assert "WKUHH" in PdfReader(path).pages[0].extract_text()
        with pytest.raises(
            Unreadable, match=r"\(100%\) cannot be text.*fonts do not say.*ocrmypdf"
        ):
            pdf_text(path)


def test_glyph_numbers_that_are_characters_need_no_map(tmp_path: Path) -> None:
    """Some programs write so."""
    read = pdf_text(composite(tmp_path / "a.pdf", [glyphs(SENTENCE, 0)]))
    assert (read.text, read.notices) == (SENTENCE.strip(), ())


@pytest.mark.parametrize("named", [b"6 0 R", b"/Identity-H", b"99 0 R"])
def test_a_map_that_names_no_character_is_none(tmp_path: Path, named: bytes) -> None:
    """It is empty, or a name, or leads nowhere: pypdf then gives the numbers of the glyphs."""
    font = (
        b"<< /Type /Font /Subtype /Type0 /BaseFont /AAAAAA+Arial /Encoding /Identity-H "
        b"/DescendantFonts [5 0 R] /ToUnicode %s >>" % named
    )
    empty = stream(
        b"/CIDInit /ProcSet findresource begin begincmap 1 begincodespacerange <0000> <FFFF> "
        b"endcodespacerange 0 beginbfchar endbfchar endcmap end"
    )
    path = pdf(tmp_path / "a.pdf", [glyphs(SENTENCE)], font, DESCENDANT, empty)
    with pytest.raises(Unreadable, match=r"\(100%\) cannot be text.*fonts do not say.*ocrmypdf"):
        pdf_text(path)


@pytest.mark.parametrize("target", ["0000", "0001", "E000", "FFFD", "0378", "D800"])
def test_a_map_to_what_no_text_has_is_refused(tmp_path: Path, target: str) -> None:
    """NUL, control, private use, replacement, unassigned, half a surrogate pair."""
    path = composite(tmp_path / "a.pdf", [glyphs(SENTENCE * 3)], target)
    with pytest.raises(Unreadable, match=r"cannot be text.*ocrmypdf"):
        pdf_text(path)


def test_glyphs_that_only_have_numbers_for_names_are_refused(tmp_path: Path) -> None:
    """A Type 3 or Type 1 font of a converter: /g1, /g2, ..."""
    names = b" ".join(b"/g%d" % number for number in range(60))
    font = (
        b"<< /Type /Font /Subtype /Type1 /BaseFont /AAAAAA+X "
        b"/Encoding << /Type /Encoding /Differences [40 %s] >> >>" % names
    )
    path = pdf(tmp_path / "a.pdf", [shown("ABCDE FGHIJ KLMNO PQRST")], font)
    with pytest.raises(Unreadable, match="fonts do not say"):
        pdf_text(path)


def test_a_scan_is_refused_and_ocr_is_named(tmp_path: Path) -> None:
    """Pages of pictures."""
    with pytest.raises(Unreadable, match=r"hold no text.*ocrmypdf"):
        pdf_text(pdf(tmp_path / "a.pdf", [SQUARE, SQUARE]))


def test_pages_without_text_among_others_are_named(tmp_path: Path) -> None:
    """Blank ones are not: nothing is lost there."""
    contents = [shown("One."), SQUARE, b"", SQUARE, SQUARE, shown("Six."), SQUARE]
    read = pdf_text(pdf(tmp_path / "a.pdf", contents))
    assert read.text.split() == ["One.", "Six."]
    (notice,) = read.notices
    assert notice.startswith("Pages 2, 4-5, 7 are without text; if that is a scan, run OCR")


def test_unreadable_pages_among_others_are_left_out_and_named(tmp_path: Path) -> None:
    """What they would give is not told to the model."""
    good = b"BT /F1 12 Tf 20 100 Td (%s) Tj ET" % (b"Plain words. " * 9)
    bad = b"BT /F1 12 Tf 20 100 Td (\\001\\002\\003\\004) Tj ET"
    few = b"BT /F1 12 Tf 20 100 Td (%s\\001) Tj ET" % (b"More words. " * 9)
    read = pdf_text(pdf(tmp_path / "a.pdf", [good, bad, few]))
    assert "Plain words." in read.text
    assert "More words." in read.text
    assert not any(c < " " and c != "\n" for c in read.text)
    assert read.notices[0].startswith("Page 2 is left out: ")
    assert read.notices[1:] == ("1 control character was dropped.",)


def test_one_damaged_page_is_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred good ones are not refused for it."""
    path = pdf(tmp_path / "a.pdf", [shown("One."), shown("Two.")])
    extract = module.PageObject.extract_text

    def fails_on_the_second(page: module.PageObject, **options: object) -> str:
        if page.page_number == 1:
            raise KeyError("/Broken")
        return extract(page, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(module.PageObject, "extract_text", fails_on_the_second)
    read = pdf_text(path)
    assert read.text == "One."
    assert read.notices[0].startswith("Page 2 is left out")


@pytest.mark.parametrize("algorithm", ["RC4-128", "AES-256"])
def test_a_password_is_needed_or_not(tmp_path: Path, algorithm: str) -> None:
    """One of the owner only forbids printing; one of the reader keeps everybody out."""
    for user_password in ("", "secret"):
        writer = PdfWriter(pdf(tmp_path / "plain.pdf", [shown("Open to all.")]))
        writer.encrypt(user_password, "owner", algorithm=algorithm)
        writer.write(tmp_path / "locked.pdf")
        if user_password:
            with pytest.raises(Unreadable, match="encrypted; save a copy without a password"):
                pdf_text(tmp_path / "locked.pdf")
        else:
            assert pdf_text(tmp_path / "locked.pdf").text == "Open to all."


def test_a_cipher_that_needs_a_package_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra that has it, too."""
    writer = PdfWriter(pdf(tmp_path / "plain.pdf", [shown("Open.")]))
    writer.encrypt("", "owner", algorithm="AES-128")
    writer.write(tmp_path / "locked.pdf")

    def without_package(reader: PdfReader, password: str) -> None:
        raise module.DependencyError("cryptography>=3.1 is required")

    monkeypatch.setattr(PdfReader, "decrypt", without_package)
    with pytest.raises(Unreadable, match=r"langchain-swarmkv\[encryption\]"):
        pdf_text(tmp_path / "locked.pdf")


def test_filled_fields_of_a_form_are_told(tmp_path: Path) -> None:
    """Their values are no part of the pages' text."""
    writer = PdfWriter(pdf(tmp_path / "plain.pdf", [shown("Name:")]))
    source = (tmp_path / "plain.pdf").read_bytes()
    assert b"AcroForm" not in source
    generic = sys.modules["pypdf.generic"]
    field = writer._add_object(
        generic.DictionaryObject(
            {
                generic.NameObject("/FT"): generic.NameObject("/Tx"),
                generic.NameObject("/T"): generic.TextStringObject("name"),
                generic.NameObject("/V"): generic.TextStringObject("Ada"),
            }
        )
    )
    form = generic.DictionaryObject({generic.NameObject("/Fields"): generic.ArrayObject([field])})
    writer.root_object[generic.NameObject("/AcroForm")] = form
    writer.write(tmp_path / "form.pdf")
    (notice,) = pdf_text(tmp_path / "form.pdf").notices
    assert "what its filled fields (1) hold is not part" in notice
