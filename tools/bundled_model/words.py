"""Names and words for the bundled base's made-up prompts: nineteen languages, and letters of any script. Pure."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from random import Random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS = _words(
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house "
    "service friend father power hour game line end member law car city community name president team minute idea "
    "body information back parent face level office door health person art war history party result change morning "
    "reason research girl guy moment air teacher force education foot boy age policy music table river garden road "
    "letter machine bird tree window street market paper picture song engine bridge field price plan report "
    "message computer phone screen model data network file error test code language answer example value customer "
    "product project user account order page list figure season rain wind light sound colour"
)
VERBS = _words(
    "find give tell ask use feel try leave call keep hold write bring show lead carry start build learn change "
    "follow create read spend open remember love buy send make see know take want need help move play run believe "
    "offer consider expect serve watch choose share explain check improve repair measure compare describe finish"
)
ADJECTIVES = _words(
    "good new first last long great little own other old right big different next early young "
    "important few public bad same able free clear simple strong real whole sure warm quiet bright dark "
    "heavy easy hard happy careful friendly useful possible common modern local full empty recent short deep"
)
NAMES = _words(
    "Anna Ben Clara David Emma Felix Grace Henry Ida James Kate Leo Maria Noah Olivia Paul Rosa Sam Tom Vera"
)
PLACES = _words(
    "France Germany Italy Spain Japan Norway Egypt Kenya Brazil Canada India Greece Poland Portugal"
)
CAPITALS = _words(
    "Paris Berlin Rome Madrid Tokyo Oslo Cairo Nairobi Brasilia Ottawa Delhi Athens Warsaw Lisbon"
)
ADVERBS = _words(
    "often never always usually already slowly quickly carefully again together later soon today"
)
LINKS = ("because", "although", "while", "before", "after", "so that", "when", "if", "until")

PROMPT_WORDS = _words(
    "the and for one with from what was not can you are has that this listed Answer question document scenario "
    "belongs under keeps pressing helps will should must may did could would because although while before after when "
    "until there never always JSON"
)
"""Words that prompts are made of and options hardly begin with: each is one token together with a blank before it."""

FOREIGN = (
    _words(
        "Haus Straße Wetter grün Prüfung Auftrag langsam heute Büro Rechnung Möbel gestern Kunde dringend Feld"
    ),
    _words(
        "casa señal camino rojo pedido mañana cliente barrio lento hoja ningún corazón abierto puerta año"
    ),
    _words("maison élève route rouge demande demain client forêt lent feuille aucun cœur ouvert porte été"),
    _words("casa più strada rosso ordine domani cliente bosco lento foglio nessuno cuore aperto città porta"),
    _words("dom ulica zielony zamówienie jutro klient wolny żaden serce otwarty źródło łąka ćma drzwi miód"),
    _words("ev sokak yeşil sipariş yarın müşteri yavaş hiçbiri kalp açık gün çiçek ağaç ışık soğuk"),
    _words("hus gata grön beställning imorgon kund långsam ingen hjärta öppen dörr älv bok vår snö"),
    _words("dům ulice zelený objednávka zítra zákazník pomalý žádný srdce otevřený dveře řeka kniha jaro"),
    _words("ház utca zöld rendelés holnap ügyfél lassú egyik szív nyitott ajtó folyó könyv tavasz"),
    _words("nhà đường xanh đơn ngày khách chậm không tim mở cửa sông sách mùa"),
    _words("дом улица зелёный заказ завтра клиент медленно никто сердце открыто дверь река книга весна снег"),
    _words("σπίτι δρόμος πράσινο παραγγελία αύριο πελάτης αργά κανένας καρδιά ανοιχτό πόρτα ποτάμι βιβλίο"),
    _words("بيت شارع أخضر طلب غدا عميل بطيء لا قلب مفتوح باب نهر كتاب ربيع"),
    _words("בית רחוב ירוק הזמנה מחר לקוח לאט לב פתוח דלת נהר ספר אביב"),
    _words("घर सड़क हरा आदेश कल ग्राहक धीमा दिल खुला दरवाज़ा नदी किताब"),
    _words("房子 街道 绿色 订单 明天 客户 没有 心 打开 门 河 书 春天 雪"),
    _words("いえ みち みどり 注文 あした お客様 ゆっくり こころ ひらく ドア カメラ テスト 本 春"),
    _words("집 거리 초록 주문 내일 고객 천천히 없음 마음 열림 문 강 책 봄"),
    _words("บ้าน ถนน สีเขียว สั่ง พรุ่งนี้ ลูกค้า ช้า ใจ เปิด ประตู แม่น้ำ"),
)
"""Words of one language each."""
ENGLISH = NOUNS + VERBS + ADJECTIVES
LATIN = tuple(word for words in FOREIGN for word in words if word[0].isascii() and word[0].isalpha())
"""Words of the languages above that are written in Latin letters."""

LETTERS = (
    "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ abcdefghijklmnopqrstuvwxyz0123456789 "
    "äöüßéèêçñãõåøæœšžčřłńśćżźığşőűđ абвгдежзийклмнопрстуфхцчшщъыьэюяёії αβγδεζηθικλμνξοπρστυφχψωάέήίόύώ "
    "אבגדהוזחטיכלמנסעפצקרשת ابتثجحخدذرزسشصضطظعغفقكلمنهوي अआइईउऊकखगघचजटठडतथदधनपफबभमयरलवशसह "
    "あいうえおかきくけこさしすせそたちつてとなにぬねのはひふへほまみむめもやゆよらりるれろわん "
    "アイウエオカキクケコサシスセソタチツテトナニヌネノハヒフヘホマミムメモヤユヨラリルレロワン "
    "กขคงจชซดตถทนบปผพฟมยรลวสหอ აბგდევზთიკლმნოპჟრსტუფქღყშჩცძწჭხჯჰ աբգդեզէըթժիլխծկհձղճմյնշոչպջռսվտրցւփքօֆ"
).split()
"""Letters of one script each; Chinese and Korean ones are drawn from their ranges."""

SYLLABLES = _words(
    "an ar be ca co da de di do el en er fa fi go ha in is ka ko la le li lo ma me mi mo na ne no on or pa pe ra re "
    "ri ro sa se si so sta ta te ti to tra un va ve vi za bri clo dra flo gra pla sto tri qui zu xo yu jo wex"
)
SIGNS = _words("é ü ñ ö å ç ß è – — … € £ ✓ → “ ” ’ 日 本 語 中 文 д а н е т م ر ح ب ا 한 글 😀 👍")


def syllables(random: Random) -> str:
    """A made-up word that can be spoken."""
    return "".join(random.choice(SYLLABLES) for _ in range(random.randint(2, 3)))


def letters(random: Random) -> str:
    """A word of two to seven letters of one script, which means nothing."""
    kind = random.random()
    if kind < 0.08:
        return "".join(chr(random.randint(0x4E00, 0x9FA5)) for _ in range(random.randint(1, 3)))
    if kind < 0.16:
        return "".join(chr(random.randint(0xAC00, 0xD7A3)) for _ in range(random.randint(1, 3)))
    alphabet = random.choice(LETTERS[:3] if kind < 0.6 else LETTERS)
    return "".join(random.choices(alphabet, k=random.randint(2, 7)))


@functools.cache
def _successors(words: tuple[str, ...], order: int) -> dict[str, str]:
    """Letters that follow each `order` letters in some words, as often as they do; "^" begins a word, "$" ends it."""
    found: dict[str, str] = defaultdict(str)
    for text in words:
        padded = "^" * order + text + "$"
        for place in range(order, len(padded)):
            found[padded[place - order : place]] += padded[place]
    return dict(found)


def pseudoword(random: Random) -> str:
    """A word of no language that reads like one of English, or of another language, drawn letter by letter.

    There are too many to be learnt by heart, so they can only be copied from the prompt.
    """
    words, order = random.choice((*[(ENGLISH, 2)] * 3, *[(LATIN, 2)] * 2, (random.choice(FOREIGN), 1)))
    successors = _successors(words, order)
    while True:
        text = "^" * order
        while not text.endswith("$") and len(text) < order + 11:
            text += random.choice(successors[text[-order:]])
        made = text[order:].removesuffix("$")
        if len(made) > 1:
            return made


def word(random: Random) -> str:
    """An English word, one of another language, or a made-up one."""
    kind = random.random()
    if kind < 0.3:
        return random.choice(random.choice((NOUNS, NOUNS, VERBS, ADJECTIVES)))
    if kind < 0.38:
        return random.choice(random.choice(FOREIGN))
    if kind < 0.83:
        return pseudoword(random)
    return syllables(random) if kind < 0.92 else letters(random)


def spelling(random: Random) -> Callable[[Random], str]:
    """Maker of the words of one list of names: any words, or those of one language or one script alone.

    In one script all names begin with the same byte: which one is being written shows at its second or third.
    """
    if random.random() < 0.8:
        return word
    words = random.choice(FOREIGN)
    kind = random.random()
    if kind < 0.35:
        return lambda random: random.choice(words)
    if kind < 0.5:
        return lambda random: "".join(
            chr(random.randint(0x4E00, 0x9FA5)) for _ in range(random.randint(1, 4))
        )
    alphabet = random.choice(("".join(words), *LETTERS[3:]))
    return lambda random: "".join(random.choices(alphabet, k=random.randint(2, 9)))


def phrase(random: Random, most: int = 5) -> str:
    """Two to `most` words with spaces between."""
    return " ".join(word(random) for _ in range(random.randint(2, most)))


def key_name(random: Random) -> str:
    """A key of a JSON object: a word or two, joined as programmers do."""
    parts = [word(random) for _ in range(random.choice((1, 1, 1, 2)))]
    kind = random.random()
    if len(parts) == 2 and kind < 0.3:
        return parts[0] + parts[1].capitalize()
    if kind < 0.9:
        return "_".join(parts)
    return random.choice(("-", " ")).join(parts)


def options_named(random: Random, least: int, most: int) -> list[str]:
    """Different names to choose from, made in one manner: words, codes, paths, sentences, with a common part or not."""
    count = random.randint(least, most)
    spell = spelling(random)
    make = random.choice((*[_plain] * 6, _join, _join, _join, _with_number, _code, _sentence_like, _any_name))
    before = after = ""
    if random.random() < 0.12:
        before = word(random) + random.choice((" ", "-", "_", "/", " ", ": "))
    elif random.random() < 0.06:
        after = random.choice((" ", "-", "_", "/")) + word(random)
    join = random.choice(("_", "_", "-", " ", "/", " ", "."))
    case = random.choice((str, str, str, str.title, str.upper, str.capitalize))
    found: dict[str, None] = {}
    for _ in range(8 * count):
        name = before + case(make(random, join, spell)) + after
        found[name] = None
        if len(found) == count:
            break
    return list(found)


def _plain(random: Random, join: str, spell: Callable[[Random], str]) -> str:
    return spell(random)


def _join(random: Random, join: str, spell: Callable[[Random], str]) -> str:
    return join.join(spell(random) for _ in range(random.choice((2, 2, 3))))


def _with_number(random: Random, join: str, spell: Callable[[Random], str]) -> str:
    return f"{spell(random)}{join}{random.randint(1, random.choice((9, 99, 2030)))}"


def _code(random: Random, join: str, spell: Callable[[Random], str]) -> str:
    letter = random.choice("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    return f"{letter}{random.choice(('', '', '-', '_'))}{random.randint(0, random.choice((9, 99, 999)))}"


def _sentence_like(random: Random, join: str, spell: Callable[[Random], str]) -> str:
    text = " ".join(spell(random) for _ in range(random.randint(2, 5)))
    return text[0].upper() + text[1:] + random.choice((".", "", "!"))


def _any_name(random: Random, join: str, spell: Callable[[Random], str]) -> str:
    return random.choice((_plain, _join, _with_number, _code))(random, join, spell) + (
        random.choice(SIGNS) if random.random() < 0.3 else ""
    )


def sentence(random: Random, noun: str | None = None) -> str:
    """A plain English sentence that means little."""
    noun = noun or random.choice(NOUNS)
    text = random.choice(
        (
            f"the {noun} is {random.choice(ADJECTIVES)} and {random.choice(ADJECTIVES)}",
            f"{clause(random)} {random.choice(LINKS)} the {noun} is {random.choice(ADJECTIVES)}",
            f"there is a {random.choice(ADJECTIVES)} {noun} in the {random.choice(NOUNS)}",
            f"the {noun} did {random.choice(ADVERBS)} {random.choice(VERBS)} {random.choice(NAMES)}",
            f"this {noun} was {random.choice(ADVERBS)} {random.choice(ADJECTIVES)}",
            f"it is {random.choice(ADJECTIVES)} to {random.choice(VERBS)} a {noun} with a {random.choice(NOUNS)}",
        )
    )
    return text[0].upper() + text[1:] + "."


def clause(random: Random) -> str:
    """Somebody may do something."""
    who = random.choice((random.choice(NAMES), f"the {random.choice(NOUNS)}", "we", "they", "people", "you"))
    modal = random.choice(("can", "will", "should", "must", "may", "did", "could", "would"))
    what = random.choice(
        (
            f"the {random.choice(NOUNS)}",
            f"a {random.choice(ADJECTIVES)} {random.choice(NOUNS)}",
            f"the {random.choice(NOUNS)} of the {random.choice(NOUNS)}",
            f"{random.randint(2, 99)} {random.choice(ADJECTIVES)} {random.choice(NOUNS)}s",
        )
    )
    return f"{who} {modal} {random.choice(('', '', 'not '))}{random.choice(VERBS)} {what}"
