"""Conversations to text: the chat template, what it prints, and what closes a turn."""

import functools
import inspect
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import jinja2
import transformers

from shell import mistake

Message = Mapping[str, Any]

# Characters of a private-use plane: no tokenizer's text and no template's literal holds them.
OPEN, CLOSE, STAND_IN = "\U000f57a0", "\U000f57a1", "\U000f57a2"

_MARKER = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


@attrs.frozen(kw_only=True, eq=False)
class Chat:
    """A tokenizer's template, bound to its settings.

    Attributes:
        tokenizer: encodes what the template prints; never changed.
        template: the Jinja text.
        settings: further variables for the template (`chat_template_kwargs`).
        special: matches one special token in a text.
    """

    tokenizer: transformers.PreTrainedTokenizerBase
    template: str
    settings: Mapping[str, Any]
    special: re.Pattern[str]

    @functools.cached_property
    def marked(self) -> str | None:
        """The template with its generation markers made visible; None where it has none."""
        return _mark(self.template)

    @functools.cached_property
    def closer(self) -> str | None:
        """What the template closes an assistant turn with, a special token; None where it does not."""
        return _closer(self)


def bind(
    tokenizer: transformers.PreTrainedTokenizerBase,
    *,
    chat_template: str | None = None,
    settings: Mapping[str, Any] | None = None,
    tools: bool = False,
) -> Chat:
    """Bind a tokenizer to the template that its conversations are printed with.

    Args:
        tokenizer: its own template is used where `chat_template` is None.
        chat_template: a file's path, or the Jinja text itself.
        settings: passed to the template as variables.
        tools: whether rows bring tools; chooses among the named templates that some tokenizers carry.

    Raises:
        Mistake: when there is no template, or no such file, or a setting has the name of what a row brings.
    """
    template = _text(chat_template) if chat_template is not None else _own(tokenizer, tools)
    specials = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    specials |= set(tokenizer.all_special_tokens)
    _own_words(settings or {}, tokenizer)
    names = "|".join(re.escape(token) for token in sorted(specials, key=len, reverse=True) if token)
    return Chat(
        tokenizer=tokenizer,
        template=template,
        settings=dict(settings or {}),
        special=re.compile(names or r"(?!)"),
    )


def render(
    chat: Chat,
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    *,
    generation_prompt: bool = False,
    template: str | None = None,
) -> str:
    """Print a conversation, or the part of one.

    Args:
        chat: the template and its settings.
        messages: at least one.
        tools: JSON schemas; None where the row has none.
        generation_prompt: also print what the model is to continue.
        template: print with this text in place of the chat's own.

    Raises:
        Mistake: what the template complains about.
    """
    try:
        text = chat.tokenizer.apply_chat_template(
            list(messages),  # pyright: ignore[reportArgumentType]
            tools=list(tools) if tools else None,
            chat_template=template or chat.template,
            add_generation_prompt=generation_prompt,
            tokenize=False,
            **chat.settings,
        )
    except Exception as error:
        # A template is a program of the caller's: it may divide by zero, call itself without end.
        said = mistake.line(error)
        if not isinstance(error, jinja2.TemplateError) and type(error).__name__ != said:
            said = f"{type(error).__name__}: {said}"
        raise mistake.Mistake(f"the chat template cannot print this conversation: {said}") from error
    return str(text)


def stop_ids(
    tokenizer: transformers.PreTrainedTokenizerBase, *, chat_template: str | None = None
) -> tuple[int, ...]:
    """Return the ids that end a turn: the eos, and what the chat template closes assistant turns with."""
    ids: list[Any] = [tokenizer.eos_token_id]
    if chat_template is not None or tokenizer.chat_template:
        closer = bind(tokenizer, chat_template=chat_template).closer
        if closer is not None:
            ids.append(tokenizer.convert_tokens_to_ids(closer))
    return tuple(sorted({number for number in ids if number is not None}))


def spare_id(tokenizer: transformers.PreTrainedTokenizerBase) -> int | None:
    """Return a token that can stand for padding since no sequence ends in it, the tokenizer's own if it can.

    Where padding and end are one token, as in many tokenizers, the unknown or another special token is taken;
    None where there is none.
    """
    stops = stop_ids(tokenizer)
    special = sorted(number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
    found = [tokenizer.pad_token_id, tokenizer.unk_token_id, *special]
    return next((n for n in found if isinstance(n, int) and n not in stops), None)


def _text(chat_template: str) -> str:
    """Read the template from a file, or take it as it is when it is one."""
    if "{%" in chat_template or "{{" in chat_template:
        return chat_template
    name = chat_template if len(chat_template) <= 200 else f"{chat_template[:60]}..."
    wanted = "give a file's path or the Jinja text itself, which has {{ or {% in it."
    path = pathlib.Path(os.path.expanduser(chat_template))
    try:
        if not path.is_file():
            raise mistake.Mistake(f"chat_template: there is no file {name}; {wanted}")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise mistake.Mistake(
            f"chat_template: {name} is not UTF-8 (byte {error.start}); save the file as UTF-8."
        ) from error
    except OSError as error:
        said = error.strerror or mistake.line(error)
        raise mistake.Mistake(f"chat_template: {name} cannot be read: {said}; {wanted}") from error


def _own_words(settings: Mapping[str, Any], tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    """Refuse settings that have the name of what a row brings, or of how it is printed."""
    taken = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters} - {
        "kwargs",
        "documents",
    }
    for name in settings:
        if name in taken:
            raise mistake.Mistake(
                f"chat_template_kwargs: {name!r} is not for options to set; it comes from the rows or is "
                "decided here. Take it out, or give the template's variable another name."
            )


def _own(tokenizer: transformers.PreTrainedTokenizerBase, tools: bool) -> str:
    """Return the template that a tokenizer carries."""
    if not tokenizer.chat_template:
        raise mistake.Mistake(
            f"the rows are conversations and the tokenizer {tokenizer.name_or_path or 'given'} has no chat "
            "template; give one with chat_template (a file or the Jinja text)."
        )
    try:
        return tokenizer.get_chat_template(None, [{}] if tools else None)
    except ValueError as error:
        raise mistake.Mistake(
            f"the tokenizer {tokenizer.name_or_path or 'given'} has several chat templates and none is the "
            f"default ({mistake.line(error)}); give one with chat_template."
        ) from error


def _mark(template: str) -> str | None:
    """Print OPEN and CLOSE inside the generation markers, with the white space control of each marker kept.

    The library measures where a marker stands from the blocks printed so far, which is wrong inside a macro
    or a captured block. Characters in the output cannot be wrong. The empty `if` keeps the newline that a tag
    swallows.
    """
    found = []

    def visible(match: re.Match[str]) -> str:
        left, end, right = match.groups()
        found.append(end)
        if end:
            return f"{{%{left} if true %}}{{% endif %}}{{{{ '{CLOSE}' }}}}{{% endgeneration {right}%}}"
        return f"{{%{left} generation %}}{{{{ '{OPEN}' }}}}{{% if true %}}{{% endif {right}%}}"

    marked = _MARKER.sub(visible, template)
    return marked if found else None


def _closer(chat: Chat) -> str | None:
    """Find what a probing conversation is closed with: the first special token after the answer."""
    probe = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": STAND_IN}]
    try:
        text = render(chat, probe)
    except mistake.Mistake:
        return None
    match = chat.special.search(text, text.rfind(STAND_IN) + 1)
    return match.group() if match else None
