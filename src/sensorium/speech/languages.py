"""The languages of speech models: ISO 639 codes and English names, as OpenAI's API writes them."""

from __future__ import annotations

_TABLE = """
af afrikaans, am amharic, ar arabic, as assamese, az azerbaijani, ba bashkir, be belarusian,
bg bulgarian, bn bengali, bo tibetan, br breton, bs bosnian, ca catalan, cs czech, cy welsh,
da danish, de german, el greek, en english, es spanish, et estonian, eu basque, fa persian,
fi finnish, fo faroese, fr french, gl galician, gu gujarati, ha hausa, haw hawaiian, he hebrew,
hi hindi, hr croatian, ht haitian creole, hu hungarian, hy armenian, id indonesian, is icelandic,
it italian, ja japanese, jw javanese, ka georgian, kk kazakh, km khmer, kn kannada, ko korean,
la latin, lb luxembourgish, ln lingala, lo lao, lt lithuanian, lv latvian, mg malagasy, mi maori,
mk macedonian, ml malayalam, mn mongolian, mr marathi, ms malay, mt maltese, my myanmar, ne nepali,
nl dutch, nn nynorsk, no norwegian, oc occitan, pa punjabi, pl polish, ps pashto, pt portuguese,
ro romanian, ru russian, sa sanskrit, sd sindhi, si sinhala, sk slovak, sl slovenian, sn shona,
so somali, sq albanian, sr serbian, su sundanese, sv swedish, sw swahili, ta tamil, te telugu,
tg tajik, th thai, tk turkmen, tl tagalog, tr turkish, tt tatar, uk ukrainian, ur urdu, uz uzbek,
vi vietnamese, yi yiddish, yo yoruba, yue cantonese, zh chinese
"""
# code -> English name in lower case; "jw" is the code of Javanese in Whisper's vocabulary
LANGUAGE_NAMES: dict[str, str] = {
    entry.split()[0]: " ".join(entry.split()[1:]) for entry in _TABLE.split(",")
}
_UNKNOWN = "unknown"


def get_language_name(code: str | None) -> str:
    """Return the English name of a language, such as "english" for "en".

    A code without a known name is returned unchanged. The result for `None` is "unknown".
    """
    return _UNKNOWN if code is None else LANGUAGE_NAMES.get(code.lower(), code)
