"""Text files in the encodings of the world, whole and damaged."""

from __future__ import annotations

import pytest

from langchain_swarmkv.documents.plain_text import Unreadable, plain_text

GERMAN = "Kündigungsfrist beträgt"
CHINESE = "本协议自双方签字之日起生效，任何一方均可提前三个月通知对方终止。"

# Language, encodings, a few words, a sentence or two.
TEXTS = {
    "German": (
        "cp1252 latin-1",
        GERMAN,
        "Der Vermieter hat die Mängel binnen vier Wochen zu beheben. Für die Übergabe gilt § 7.",
    ),
    "French": (
        "cp1252",
        "L’avenant n’est pas signé",
        "L’employeur s’engage : « le salarié » n’est pas lié au-delà du délai. “Clause d’œuvre”.",
    ),
    "Spanish": (
        "cp1252 latin-1",
        "El dueño cumplirá mañana",
        "¿Quién firmó? El arrendador devolverá la fianza en el plazo señalado por la ley española.",
    ),
    "Portuguese": ("cp1252", "A cláusula não é válida", "O inquilino não poderá fazer alterações."),
    "Italian": ("cp1252", "La società è estinta", "La responsabilità del venditore è limitata."),
    "Swedish": ("cp1252", "Hyran är förfallen", "Båda parter får säga upp avtalet på våren."),
    "Polish": (
        "cp1250 iso8859_2",
        "Kaucja będzie zwrócona później",
        "Wynajmujący może żądać zapłaty odsetek, jeśli najemca opóźnia się z płatnością.",
    ),
    "Czech": ("cp1250", "Smlouva končí v září", "Pronajímatel může smlouvu vypovědět písemně."),
    "Russian": (
        "cp1251 koi8-r",
        "Общие положения",
        "Покупатель обязан принять товар и оплатить его в течение десяти дней.",
    ),
    "Ukrainian": ("cp1251", "Загальні положення", "Покупець зобов'язаний прийняти її вчасно."),
    "Greek": (
        "cp1253 iso8859_7",
        "Γενικοί όροι",
        "Ο αγοραστής οφείλει να παραλάβει το προϊόν και να καταβάλει το τίμημα.",
    ),
    "Turkish": (
        "cp1254",
        "Satış koşulları değişti",
        "Alıcı, malı teslim almakla yükümlüdür. Gecikme hâlinde sözleşme feshedilmiş sayılır.",
    ),
    "Hebrew": ("cp1255", "תנאים כלליים", "הקונה חייב לשלם את המחיר במועד שנקבע."),
    "Arabic": ("cp1256", "الشروط العامة", "يلتزم المشتري بدفع الثمن في الموعد المحدد."),
    "Thai": ("cp874", "ข้อกำหนดทั่วไป", "ผู้ซื้อต้องชำระราคาตามกำหนดเวลา"),
    "Japanese": (
        "shift_jis euc_jp",
        "売買契約の一般条項",
        "買主は、商品を受領した日から十日以内に代金を支払わなければならない。",
    ),
    "Chinese": ("gb18030", "一般条款和条件", CHINESE),
    "Chinese (traditional)": ("big5", "一般條款與條件", "買方應於收到貨物後十日內支付價款。"),
    "Korean": ("euc_kr", "일반 약관", "구매자는 물품을 받은 날부터 십일 이내에 대금을 지급한다."),
    "English": ("cp1252", "The buyer’s duty", "“Price” means £500 – or €600 – at the café’s door…"),
}
CASES = [
    (language, encoding, text)
    for language, (encodings, *texts) in TEXTS.items()
    for encoding in encodings.split()
    for text in (*texts, "\n".join(texts * 20))
]


@pytest.mark.parametrize(("language", "encoding", "text"), CASES)
def test_common_code_pages_are_found_by_their_languages(
    language: str, encoding: str, text: str
) -> None:
    """Few words and many; and the reader is told that it was a guess."""
    read = plain_text(text.encode(encoding))
    assert read.text == text
    assert "guessed as" in " ".join(read.notices)
    assert "name its encoding" in read.notices[0]


@pytest.mark.parametrize("text", [GERMAN, TEXTS["French"][2]])
def test_few_letters_in_a_long_english_text_are_enough(text: str) -> None:
    """However far they stand from beginning and end."""
    filler = "The agreement is governed by the law of the country. " * 400
    assert plain_text((filler + text + filler).encode("cp1252")).text == filler + text + filler


@pytest.mark.parametrize("encoding", ["cp1252", "gb18030", "cp932", "cp1251"])
def test_a_damaged_file_in_a_code_page_is_read_all_the_same(encoding: str) -> None:
    """What is cut or broken stands as U+FFFD."""
    text = {"cp1252": GERMAN + " drei", "gb18030": CHINESE}.get(encoding)
    text = text or TEXTS["Japanese" if encoding == "cp932" else "Russian"][2]
    undefined = {"cp1252": b"\x81", "cp1251": b"\x98"}.get(encoding)
    data = text.encode(encoding)
    read = plain_text(data + undefined if undefined else data[:-1])
    assert read.text[:20] == text[:20]
    assert "U+FFFD" in read.notices[1]


@pytest.mark.parametrize("text", [text for _, *texts in TEXTS.values() for text in texts])
def test_utf8_with_a_damage_stays_utf8(text: str) -> None:
    """A foreign byte, and a last character that is cut; the rest of the text is as it was."""
    data = text.encode()
    middle = len(text) // 2
    pieces = (text[:middle].encode(), text[middle:].encode())
    cut = next(i for i in range(len(data) - 1, 0, -1) if data[i] >= 0x80)
    for broken, expected in (
        (b"\xff".join(pieces), f"{text[:middle]}\ufffd{text[middle:]}"),
        (data[:cut], data[:cut].decode(errors="replace")),
    ):
        read = plain_text(broken)
        assert (read.text, read.encoding) == (expected, "utf-8")
        assert read.notices == ("1 place was not valid utf-8, and stands as U+FFFD.",)


def test_ascii_with_one_impossible_byte_is_utf8() -> None:
    """No text has it as a letter."""
    read = plain_text(b"Thirty words of plain English, \xff and one bad byte.")
    assert read.text == "Thirty words of plain English, \ufffd and one bad byte."


def test_replacement_characters_of_the_file_are_not_counted() -> None:
    """They are as valid as any."""
    assert plain_text("a \ufffd b".encode()).notices == ()
    (notice,) = plain_text(f"{CHINESE} \ufffd ".encode() + b"\x80\x80").notices
    assert notice.startswith("2 places were")


@pytest.mark.parametrize("text", [texts[1] for texts in TEXTS.values()] + [CHINESE * 9, "ASCII."])
@pytest.mark.parametrize(
    "encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"]
)
def test_unicode_is_found_with_a_mark_and_mostly_without(encoding: str, text: str) -> None:
    """Marks decide; without one it is a guess, and few words are not enough in every language."""
    text = text + "\n" + text * 6
    read = plain_text(text.encode(encoding))
    assert read.text == text
    is_told = encoding in ("utf-16-le", "utf-16-be", "utf-32-le")
    assert ("byte order mark" in " ".join(read.notices)) == is_told


@pytest.mark.parametrize("mark", [b"\xff\xfe", b"\xfe\xff"])
def test_half_a_character_at_the_end_of_utf16_is_told(mark: bytes) -> None:
    """A download that broke off."""
    encoding = "utf-16-le" if mark == b"\xff\xfe" else "utf-16-be"
    read = plain_text(mark + CHINESE.encode(encoding)[:-1])
    assert read.text == CHINESE[:-1] + "\ufffd"
    assert "1 place was not valid utf-16" in read.notices[0]


def test_old_japanese_mail_is_read() -> None:
    """ISO-2022-JP is ASCII with escape sequences."""
    text = TEXTS["Japanese"][2]
    assert plain_text(text.encode("iso2022_jp")).text == text


@pytest.mark.parametrize("stray", ["\0", "\x01", "\x08", "\x1b", "\x7f", "\x84"])
def test_a_stray_control_character_is_dropped_with_a_notice(stray: str) -> None:
    """It is no proof of another encoding."""
    read = plain_text(f"{GERMAN} drei{stray} Monate.\n".encode())
    assert read.text == f"{GERMAN} drei Monate.\n"
    assert read.notices == (f"1 control character was dropped: U+{ord(stray):04X}.",)


def test_white_space_that_is_a_control_character_stays() -> None:
    """Tabs, line ends and page breaks are text."""
    text = "a\tb\nc\fd\ve\r\nf\x85"
    read = plain_text(text.encode())
    assert (read.text, read.notices) == (text, ())


def test_padding_at_the_end_is_dropped_however_long() -> None:
    """Blocks of a tape and preallocated files end in NULs."""
    read = plain_text(b"A short text." + bytes(4000))
    assert read.text == "A short text."
    assert read.notices == ("4,000 control characters were dropped: U+0000.",)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (bytes(range(256)) * 4, "control characters"),
        (b"\x01\x02\x03\x04\x05 five of ten", "5 of its 17 characters"),
        (b"%PDF-1.7\n", "it is a PDF"),
        (b"PK\x03\x04word/document.xml", ".docx"),
        (b"{\\rtf1\\ansi text}", "RTF"),
        (b"GGUF\x03\x00\x00\x00" + bytes(64), "GGUF"),
    ],
)
def test_what_is_no_text_is_refused_with_the_reason(data: bytes, reason: str) -> None:
    """And not fed to a model."""
    with pytest.raises(Unreadable, match=reason):
        plain_text(data)
