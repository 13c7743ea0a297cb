"""Tokens coloured by teacher − student: where the teacher would rather not have written what the student wrote."""

from __future__ import annotations

from dataclasses import dataclass

from opd_trainer.report.records import TokenRecords

#: Gaps beyond this, in nats, have the full colour.
FULL_COLOUR = 4.0
#: Tokens of one sample that are drawn.
TOKENS = 600
_RED, _BLUE, _WHITE = (214, 69, 65), (38, 113, 178), (255, 255, 255)


@dataclass(frozen=True, slots=True)
class HeatToken:
    """One drawn token."""

    text: str
    background: str
    title: str
    trained: bool
    #: Line breaks that follow it.
    breaks: int


@dataclass(frozen=True, slots=True)
class HeatMap:
    """A response as coloured tokens."""

    tokens: list[HeatToken]
    hidden: int


def heat_map(tokens: TokenRecords) -> HeatMap:
    """Colours and tooltips for each token; a token without both scores is left white."""
    mask = tokens.mask or [1] * len(tokens.text)
    rows = zip(tokens.text, tokens.student_logprobs, tokens.teacher_logprobs, mask, strict=False)
    drawn = [_token(*row) for row in list(rows)[:TOKENS]]
    return HeatMap(drawn, max(0, len(tokens.text) - len(drawn)))


def _token(text: str, student: float | None, teacher: float | None, mask: int) -> HeatToken:
    gap = teacher - student if student is not None and teacher is not None and mask else None
    visible = text.replace("\n", "⏎")
    return HeatToken(
        text=visible or "∅",
        background=colour(gap) if gap is not None else "transparent",
        title=_title(text, student, teacher, gap),
        trained=bool(mask),
        breaks=text.count("\n"),
    )


def _title(text: str, student: float | None, teacher: float | None, gap: float | None) -> str:
    if gap is None:
        return f"{text!r}: not scored"
    return f"{text!r}: student {student:.3f}, teacher {teacher:.3f}, teacher − student {gap:+.3f} nats"


def colour(gap: float) -> str:
    """White at 0, red where the teacher likes the token less (negative), blue where more; full at ±FULL_COLOUR nats."""
    strength = min(1.0, abs(gap) / FULL_COLOUR) ** 0.7
    end = _RED if gap < 0 else _BLUE
    red, green, blue = (round(w + (e - w) * strength * 0.85) for w, e in zip(_WHITE, end, strict=True))
    return f"rgb({red},{green},{blue})"


def scale() -> list[tuple[str, str]]:
    """(label, colour) of the legend."""
    return [(f"{gap:+g}" if gap else "0", colour(gap)) for gap in (-4.0, -2.0, -1.0, -0.25, 0.0, 0.25, 1.0, 2.0, 4.0)]
