"""The languages of Whisper's models: their codes, their names, and which have spaces between words.

Codes are Whisper's tokens: ISO 639-1 with a few exceptions. A checkpoint may have fewer languages.
"""

from __future__ import annotations

_TABLE = """
    en=english zh=chinese de=german es=spanish ru=russian ko=korean fr=french ja=japanese
    pt=portuguese tr=turkish pl=polish ca=catalan nl=dutch ar=arabic sv=swedish it=italian
    id=indonesian hi=hindi fi=finnish vi=vietnamese he=hebrew uk=ukrainian el=greek ms=malay
    cs=czech ro=romanian da=danish hu=hungarian ta=tamil no=norwegian th=thai ur=urdu hr=croatian
    bg=bulgarian lt=lithuanian la=latin mi=maori ml=malayalam cy=welsh sk=slovak te=telugu
    fa=persian lv=latvian bn=bengali sr=serbian az=azerbaijani sl=slovenian kn=kannada et=estonian
    mk=macedonian br=breton eu=basque is=icelandic hy=armenian ne=nepali mn=mongolian bs=bosnian
    kk=kazakh sq=albanian sw=swahili gl=galician mr=marathi pa=punjabi si=sinhala km=khmer sn=shona
    yo=yoruba so=somali af=afrikaans oc=occitan ka=georgian be=belarusian tg=tajik sd=sindhi
    gu=gujarati am=amharic yi=yiddish lo=lao uz=uzbek fo=faroese ht=haitian_creole ps=pashto
    tk=turkmen nn=nynorsk mt=maltese sa=sanskrit lb=luxembourgish my=myanmar bo=tibetan tl=tagalog
    mg=malagasy as=assamese tt=tatar haw=hawaiian ln=lingala ha=hausa ba=bashkir jw=javanese
    su=sundanese yue=cantonese
"""
_OTHER_NAMES = """
    my=burmese ca=valencian nl=flemish ht=haitian lb=letzeburgesch ps=pushto pa=panjabi
    ro=moldavian ro=moldovan si=sinhalese es=castilian zh=mandarin
"""


def _read(table: str) -> list[tuple[str, str]]:
    pairs = (entry.partition("=") for entry in table.replace("\n", " ").split())
    return [(code, name.replace("_", " ")) for code, _, name in pairs]


NAMES = dict(_read(_TABLE))  # code -> English name
_CODES = {name: code for code, name in _read(_TABLE) + _read(_OTHER_NAMES)}
# Languages that are written without spaces between words.
WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})


def find_code(language: str) -> str:
    """Return a language's code for its name or code in any case, or else the text in lower case."""
    text = language.strip().lower()
    return _CODES.get(text, text)
