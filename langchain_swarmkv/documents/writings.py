"""How languages are written: which characters beyond ASCII a text has, and how often.

A *writing* gives the natural logarithm of the probability of such characters. It is rough on
purpose: it must only tell a text from the same bytes in another code page.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from math import log
from typing import Protocol

__all__ = ["WRITINGS", "Writing"]

_PUNCTUATION = frozenset("‘’‚“”„–—…•«»‹›€£§°©®™²³½¼¾±·×µ\u00a0№†‰")
_INSIDE_WORDS = frozenset("’·–—\u00a0")

_ODD = log(1e-5)
"""A character that the language does not use."""
_NO_TEXT = log(1e-8)
"""A character that no text has: control, unassigned, private use, U+FFFD."""
_STRANGE_PLACE = log(0.01)
"""Where a character hardly ever stands: an upper-case letter after a lower-case one, say."""
_MIXED_ALPHABETS = log(0.001)
"""A letter of another alphabet beside an ASCII one, in one word."""
_ACCENT_AFTER_ACCENT = log(0.15)
_HAN_BESIDE_ASCII = log(0.05)


class Writing(Protocol):
    """One language in all the code pages that it comes in."""

    language: str
    prior: float
    """How likely the language is before a character was seen; a logarithm."""
    encodings: tuple[str, ...]
    """Python's names of its code pages."""

    def score(self, text: str) -> float:
        """The logarithm of the probability of the characters of `text` beyond ASCII."""


class _Alphabet:
    """A language of letters, each of them one byte in its code pages.

    Args:
        language: its English name.
        encodings: names of code pages, in one string.
        letters: those beyond ASCII, the most frequent first.
        prior: a probability.
        share: of letters among characters beyond ASCII; the rest is punctuation.
        is_latin: most letters are ASCII, and those beyond stand alone between them. Elsewhere a
            word has no ASCII letter; upper-case letters are as frequent as the alphabet says for
            lower case, by a quarter.
    """

    def __init__(
        self,
        language: str,
        encodings: str,
        letters: str,
        prior: float = 1.0,
        share: float = 0.85,
        *,
        is_latin: bool = True,
    ) -> None:
        self.language = language
        self.encodings = tuple(encodings.split())
        self.prior = log(prior)
        self._is_latin = is_latin
        # Zipf's law, flattened.
        weights = {letter: 1 / (rank + 2) for rank, letter in enumerate(letters)}
        total = sum(weights.values())
        self._letters = {letter: log(share * w / total) for letter, w in weights.items()}
        if not is_latin:
            for letter, score in list(self._letters.items()):
                if len(letter.upper()) == 1:
                    self._letters.setdefault(letter.upper(), score + log(0.25))
        self._punctuation = log((1 - share) / len(_PUNCTUATION))

    def score(self, text: str) -> float:
        return sum(self._scores(text))

    def _scores(self, text: str) -> Iterator[float]:
        for before, character, after in _beyond_ascii(text):
            if character in self._letters:
                yield self._letters[character] + self._place(before, character, after)
            elif character in _PUNCTUATION:
                yield self._punctuation
                if before.isalpha() and after.isalpha() and character not in _INSIDE_WORDS:
                    yield _STRANGE_PLACE
            else:
                yield _NO_TEXT if _is_no_text(character) else _ODD

    def _place(self, before: str, letter: str, after: str) -> float:
        score = 0.0
        if before.islower() and letter.isupper():
            score += _STRANGE_PLACE
        if not self._is_latin:
            is_mixed = any(c.isascii() and c.isalpha() for c in (before, after))
            return score + (_MIXED_ALPHABETS if is_mixed else 0.0)
        if letter.islower() and after.isupper():
            score += _STRANGE_PLACE
        if before.isalpha() and not before.isascii():
            score += _ACCENT_AFTER_ACCENT
        return score


class _Ideographs:
    """A language of two bytes a character, in the rows of its national standard.

    Args:
        language: its English name.
        encodings: names of code pages, in one string.
        standard: the encoding whose first bytes count the rows.
        rows: first byte, last first byte, share of the text, number of characters there.
        prior: a probability.
    """

    def __init__(
        self,
        language: str,
        encodings: str,
        standard: str,
        rows: Iterable[tuple[int, int, float, int]],
        prior: float = 1.0,
    ) -> None:
        self.language = language
        self.encodings = tuple(encodings.split())
        self.prior = log(prior)
        self._standard = standard
        self._rows = {
            row: log(share / count)
            for first, last, share, count in rows
            for row in range(first, last + 1)
        }
        self._known: dict[str, float] = {}

    def score(self, text: str) -> float:
        return sum(
            self._character(character) + _HAN_BESIDE_ASCII * _num_ascii_letters(before, after)
            for before, character, after in _beyond_ascii(text)
        )

    def _character(self, character: str) -> float:
        if character not in self._known:
            self._known[character] = self._row(character)
        return self._known[character]

    def _row(self, character: str) -> float:
        if _is_no_text(character):
            return _NO_TEXT
        try:
            row = character.encode(self._standard)[0]
        except UnicodeEncodeError:
            return log(0.001 / 20_000)  # in an extension of the standard
        return self._rows.get(row, _ODD)


def _beyond_ascii(text: str) -> Iterator[tuple[str, str, str]]:
    before = " "
    for character, after in zip(text, text[1:] + " ", strict=True):
        if not character.isascii():
            yield before, character, after
        before = character


def _is_no_text(character: str) -> bool:
    return character == "\ufffd" or unicodedata.category(character) in ("Cc", "Cn", "Co")


def _num_ascii_letters(*characters: str) -> int:
    return sum(c.isascii() and c.isalpha() for c in characters)


_WEST = "cp1252 cp850 mac_roman"
_CENTRAL = "cp1250 iso8859_2"

_ALPHABETS = (
    _Alphabet("English", _WEST, "éèñöüàçïëôâ", share=0.3),
    _Alphabet("German", _WEST, "üäößÜÖÄé"),
    _Alphabet("French", _WEST, "éèàêçôùîûâïëœÉÀÊÈÇŒüæ"),
    _Alphabet("Spanish", _WEST, "óíáéñúüÁÉÍÓÚÑ¿¡ºª"),
    _Alphabet("Portuguese", _WEST, "ãçáéíóõêúâàôÃÇÁÉªº", 0.5),
    _Alphabet("Italian", _WEST, "àèùòìéÈÀ", 0.5),
    _Alphabet("Swedish", _WEST, "äåöÅÄÖé", 0.3),
    _Alphabet("Danish", _WEST, "øåæØÅÆé", 0.3),
    _Alphabet("Finnish", _WEST, "äöåÄÖ", 0.2),
    _Alphabet("Dutch", _WEST, "ëéïèöü", 0.2, 0.7),
    _Alphabet("Icelandic", _WEST, "áíðéóþöæúýÞÍÁÓÚÉÖ", 0.03),
    _Alphabet("Polish", _CENTRAL, "łąężśóćńźŁŚŻĆŹÓ", 0.5),
    _Alphabet("Czech", _CENTRAL, "íáéěřčžýšůúťďňóŠČŘŽÚÍ", 0.3),
    _Alphabet("Slovak", _CENTRAL, "áíéčúýžšťľňôäďóĺŕŠČŽ", 0.1),
    _Alphabet("Hungarian", _CENTRAL, "áéöóíőüúűÁÉŐÖ", 0.2),
    _Alphabet("Croatian", _CENTRAL, "čšžćđČŠŽ", 0.1),
    _Alphabet("Romanian", _CENTRAL, "ăîâşţșțÎŞŢ", 0.1),
    _Alphabet("Turkish", "cp1254", "ıüşçğöİŞÇÖÜâ", 0.3),
    _Alphabet("Lithuanian", "cp1257", "ėųšįžąūčęŠŽ", 0.05),
    _Alphabet("Latvian", "cp1257", "āīēšūņķļžčģŠĀ", 0.05),
    _Alphabet("Estonian", "cp1257", "äõüöšžÄÕ", 0.05),
)

_CYRILLIC = "cp1251 koi8_r cp866 iso8859_5 mac_cyrillic"

_OTHER_ALPHABETS = tuple(
    _Alphabet(language, encodings, letters, prior, 0.93, is_latin=False)
    for language, encodings, letters, prior in (
        ("Russian", _CYRILLIC, "оеаинтсрвлкмдпуяыьгзбчйхжшюцщэфъё", 1.0),
        ("Ukrainian", "cp1251 koi8_u", "оаниівретскмлдупязьгйбчхжющшцєїфґ", 0.2),
        ("Bulgarian", "cp1251", "аоеитнрсвлкдпмзгъуяцчбжйхщшюфь", 0.2),
        ("Serbian", "cp1251", "аиоенрсјтукдмвплзгбшчцњљжћхђфџ", 0.1),
        ("Greek", "cp1253 iso8859_7", "αοιετνσςρπκμυλήηίάόωθδέγχβφώύξζψϊΐϋΰ", 0.5),
        ("Hebrew", "cp1255", "יוהלאמתבשרנםכעדחפקטצגזסןךףץ", 0.3),
        ("Arabic", "cp1256 iso8859_6", "اليمونتربةعدسفهكقأحجىشصطخذضزإغءثآئظؤ،", 0.3),
        (
            "Thai",
            "cp874",
            "านรอกเงยลมวทตดสคปะแห่้ิีัาำุูึืขจชพบผใไโถธฉฝศษณญฐซหฟฮ์็ๆ",
            0.2,
        ),
    )
)

# Rows of frequent characters, of rare ones, of kana and of signs.
_IDEOGRAPHS = (
    _Ideographs(
        "Chinese",
        "gb18030",
        "gb2312",
        [
            (0xA1, 0xA1, 0.08, 94),
            (0xA2, 0xA2, 0.001, 94),
            (0xA3, 0xA3, 0.08, 94),
            (0xA4, 0xAF, 0.001, 600),
            (0xB0, 0xD7, 0.85, 3755),
            (0xD8, 0xF7, 0.01, 3008),
        ],
    ),
    _Ideographs(
        "Chinese",
        "cp950",
        "big5",
        [
            (0xA1, 0xA1, 0.1, 157),
            (0xA2, 0xA3, 0.002, 250),
            (0xA4, 0xC6, 0.85, 5401),
            (0xC7, 0xF9, 0.01, 7652),
        ],
        0.7,
    ),
    _Ideographs(
        "Japanese",
        "cp932 euc_jp",
        "euc_jp",
        [
            (0x8E, 0x8E, 0.002, 63),
            (0xA1, 0xA1, 0.1, 94),
            (0xA2, 0xA2, 0.001, 94),
            (0xA3, 0xA3, 0.01, 94),
            (0xA4, 0xA4, 0.35, 83),
            (0xA5, 0xA5, 0.15, 86),
            (0xA6, 0xAF, 0.001, 300),
            (0xB0, 0xCF, 0.38, 2965),
            (0xD0, 0xF4, 0.01, 3390),
        ],
    ),
    _Ideographs(
        "Korean",
        "cp949",
        "euc_kr",
        [
            (0xA1, 0xA1, 0.02, 94),
            (0xA2, 0xAF, 0.005, 900),
            (0xB0, 0xC8, 0.95, 2350),
            (0xCA, 0xFD, 0.005, 4888),
        ],
        0.7,
    ),
)

WRITINGS: tuple[Writing, ...] = (*_ALPHABETS, *_OTHER_ALPHABETS, *_IDEOGRAPHS)
