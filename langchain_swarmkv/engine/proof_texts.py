# ruff: noqa: RUF001 - that they look alike to people is no matter here
"""Texts on which two tokenisers must agree: what cuts text differently is in them."""

from __future__ import annotations

__all__ = ["PROOF_TEXTS", "SURROUNDINGS"]

SURROUNDINGS = "X XX  Xa aX1 1X12X123 ?X??X ??XX??\nX\n\nX\r\nX 'X'sX's X'S X\tX\t\tX  X   X.X\n"
"""Where each character is tried, in place of the X."""

_PROSE = """\
The year's first claim, filed 2024-01-31 as US 11,234,567 B2, covers a "device" (100-106); it's
what they've said we'd do, isn't it? I'M SURE YOU'LL AGREE, AND THEY'RE DONE. O'Neill's naïve
co-operation re-used 3.14159 of 1,000,000 units -- at 12:45 p.m. -- for $9.99/kg (±0.5 %)...

\t1.  First item,  two spaces.
\t2.  Second   item,   three.
        An indented block.


Three line breaks before this; trailing spaces after it.   \n"""

_CODE = """\
def fib(n: int) -> list[int]:
    \"\"\"First n numbers.\"\"\"
    a, b = 0, 1
    out = []
    while len(out) < n:
        out.append(a); a, b = b, a + b  # 1, 1, 2, 3, 5, 8, 13, 21, 34, 55
    return out


if __name__ == '__main__':
\tprint({i: f"{x:>10.3f}" for i, x in enumerate(fib(20))}, sep="\\n\\t")
<div class="a-b" id='c'>&nbsp;&#x2014;</div>  // ===== !!! ??? *** <<< >>> |||
SELECT COUNT(*) FROM t WHERE x >= 1e-9 AND y != 0xFF00; {"key": [null, true, -1.5e+10]}
"""

_CHINESE = (
    "本发明涉及一种电池管理系统，包括控制器（100）和2024个传感器。其中：温度不超过60℃；电压为3.7V。"
    "「引用」、《书名》——破折号……\n\n　　全角空格开头的段落，ＡＢＣ１２３。"
)

_SCRIPTS = (
    "Привет, мир! Это 3-й тест. Ελληνικά: ένα, δύο. עברית: שלום. العربية: مرحبا ١٢٣. "
    "हिन्दी: नमस्ते १२३। ไทย: สวัสดี ๑๒๓ 日本語のテキスト、カタカナ。 한국어 문장입니다. "
    "Việt Nam: Tiếng Việt. Türkçe: İstanbul'da ığdır. Deutsch: Straße ÄÖÜ. "
    "Łódź naïve façade Ⅷ ½ x² ① ٣٫٥ ʻokina l'été d'Artagnan"
)

_EMOJI = "😀 😀😀  👩‍👩‍👧‍👦 👍🏽 🇨🇭🇩🇪 ❤️ ☃ 🏴󠁧󠁢󠁥󠁮󠁧󠁿 a😀b 1😀2 😀's ✅ done\n🚀🚀🚀\n\n"

_COMBINING = "e\u0301a\u0308 cafe\u0301s 1\u0301 \u0301x \u200b\u200d\ufeff a\u00adb n\u0303\n"

_DIGITS = "0 00 000 0000 1234567890 12 345  6   7\t8\n9 a1b22c333 1.2.3 1,234.5 -1 +1e5 (1) '1 '1s"

_LINE_ENDS = (
    "a\r\nb\r\n\r\nc\rd\n\re \r\n f\r\n\t?\r\n?!\n\n?!\r\n1\r\n2\n'\n's\n \n"
    "\u00a0\u2003x\u2028y\u3000z\x0b\x0c"
)

_SPACES = "".join(
    f"a{s}b{s}1{s}?{chr(10) * n}c{s}\n{chr(9) * n}d\n{s}\n\n{s}'s"
    for n in (1, 2, 3, 4, 7, 8, 16, 31, 80)
    for s in (" " * n,)
)

_ENDINGS = (
    "s",
    "S",
    "t",
    "re",
    "RE",
    "rE",
    "ve",
    "m",
    "M",
    "ll",
    "LL",
    "d",
    "x",
    "l",
    "r",
    "\u017f",
)
_CONTRACTIONS = " ".join(
    f"{quote}{ending} a{quote}{ending} {quote}{ending}b 1{quote}{ending}1"
    for quote in ("'", "\u2019", "''", " '")
    for ending in _ENDINGS
)

PROOF_TEXTS = (
    _PROSE,
    _CODE,
    _CHINESE,
    _SCRIPTS,
    _EMOJI,
    _COMBINING,
    _DIGITS,
    _SPACES,
    _LINE_ENDS,
    _CONTRACTIONS,
)
"""English, code, Chinese, other scripts, emoji, combining marks, digits, white space, CRLF."""
