"""Conversations: what the template prints, what is trained of it, and what is refused."""

import pytest

from shell import chat as chats
from shell import counts, mistake, spans, tiny
from tests.shell import words

PLAIN = """{%- for m in messages -%}
{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

# The last assistant turn is printed with a block of thoughts, empty where none are given; others without.
THINKING = """{%- for m in messages -%}
{{- '<|im_start|>' + m['role'] + '\\n' -}}
{%- set later = messages[loop.index:] | selectattr('role', 'equalto', 'assistant') | list -%}
{%- if m['role'] == 'assistant' and not later -%}
{{- '<think>\\n' + (m['reasoning_content'] or '') + '\\n</think>\\n' -}}
{%- endif -%}
{{- m['content'] or '' -}}
{%- for c in m['tool_calls'] or [] -%}{{- '<call>' + (c['function'] | tojson) + '</call>' -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

TALK = [words.user("hi"), words.assistant("yo"), words.user("and?"), words.assistant("so 🙂 é\n好")]


def trained_text(tokenizer, prepared, row=0):
    (one,) = prepared.samples(row)
    return tokenizer.decode(one.tokens[one.trained])


def test_a_character_that_marks_turns_is_refused_in_a_row():
    chat = chats.bind(tiny.tokenizer())
    messages = [words.user("hi"), words.assistant(chats.OPEN)]
    with pytest.raises(mistake.Mistake, match="take them out of the row"):
        spans.assistant_spans(chat, messages, None, chats.render(chat, messages))


def whole_text(tokenizer, prepared, row=0):
    (one,) = prepared.samples(row)
    return tokenizer.decode(one.tokens)


@pytest.mark.parametrize("template", [tiny.TEMPLATE, PLAIN, THINKING])
def test_only_assistant_turns_are_trained_each_with_its_closing_token(tmp_path, template):
    tokenizer = tiny.tokenizer()
    prepared = words.prepare(
        tmp_path, [{"messages": TALK}], tokenizer, assistant_only_loss=True, chat_template=template
    )
    thoughts = "<think>\n\n</think>\n" if template == THINKING else ""
    assert trained_text(tokenizer, prepared) == f"yo<|im_end|>{thoughts}so 🙂 é\n好<|im_end|>"
    assert prepared.counts.unclosed == 0


@pytest.mark.parametrize("template", [tiny.TEMPLATE, PLAIN, THINKING])
def test_training_ids_are_one_print_of_the_whole_conversation(tmp_path, template):
    tokenizer = tiny.tokenizer()
    messages = [
        words.user("what is it?"),
        words.assistant("", reasoning_content="look", tool_calls=[words.call("look", x=1)]),
        {"role": "tool", "content": "7"},
        words.assistant("It is 7.", reasoning_content="easy"),
    ]
    if template == PLAIN:
        messages = [{key: value for key, value in m.items() if key != "tool_calls"} for m in messages[2:]]
    prepared = words.prepare(
        tmp_path, [{"messages": messages}], tokenizer, assistant_only_loss=True, chat_template=template
    )
    whole = tokenizer.apply_chat_template(messages, chat_template=template, return_dict=True)["input_ids"]
    assert prepared.samples(0)[0].tokens.tolist() == whole
    if template == THINKING:
        called = '<call>{"name": "look", "arguments": {"x": 1}}</call><|im_end|>'
        answered = "<think>\neasy\n</think>\nIt is 7.<|im_end|>"
        assert trained_text(tokenizer, prepared) == called + answered


def test_both_calls_of_a_turn_are_trained_and_their_results_not(tmp_path):
    tokenizer = tiny.tokenizer()
    messages = [
        words.user("both"),
        words.assistant(None, tool_calls=[words.call("one", a=1), words.call("two", b=2)]),
        {"role": "tool", "content": "first"},
        {"role": "tool", "content": "second"},
        words.assistant("done"),
    ]
    prepared = words.prepare(tmp_path, [{"messages": messages}], tokenizer, assistant_only_loss=True)
    trained = trained_text(tokenizer, prepared)
    assert '"one"' in trained
    assert '"two"' in trained
    assert "first" not in trained
    assert "second" not in trained


def test_a_turn_is_closed_by_the_templates_token_though_it_is_not_the_eos(tmp_path):
    tokenizer = words.word_tokenizer("u a x y ?", special="<s> F E", eos="F")
    template = "{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] + ' E ' }}{% endfor %}"
    rows = [{"messages": [words.user("x"), words.assistant("y"), words.user("x"), words.assistant("y y")]}]
    prepared = words.prepare(tmp_path, rows, tokenizer, chat_template=template)
    assert prepared.samples(0)[0].tokens.tolist() == [3, 5, 2, 4, 6, 2, 3, 5, 2, 4, 6, 6, 2]
    assert len(prepared.samples(0)[0].tokens) == 13
    words_only = "{% generation %}{{ m['content'] + ' ' }}{% endgeneration %}"
    marked = (
        "{% for m in messages %}{{ m['role'][0] + ' ' }}{% if m['role'] == 'assistant' %}"
        + words_only
        + "{% else %}{{ m['content'] + ' ' }}{% endif %}{{ 'E ' }}{% endfor %}"
    )
    for text in (template, marked):
        one = words.prepare(tmp_path, rows, tokenizer, chat_template=text, assistant_only_loss=True).samples(
            0
        )[0]
        labels = words.targets(one)
        assert [labels[position] for position in (5, 12)] == [2, 2]
        assert labels[2] == labels[8] == -100
    assert chats.stop_ids(tokenizer, chat_template=template) == (1, 2)


def test_a_row_that_ends_without_a_stop_token_is_counted_and_told(tmp_path):
    tokenizer = tiny.tokenizer()
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    prepared = words.prepare(tmp_path, [{"messages": TALK}], tokenizer, chat_template=template)
    assert prepared.counts.unclosed == 1
    assert "without a stop token" in counts.notes(prepared.counts)[0]


def test_a_template_that_puts_thoughts_into_the_last_turn_trains_no_prompt_and_loses_no_answer(tmp_path):
    tokenizer = tiny.tokenizer()
    rows = [{"prompt": TALK[:3], "completion": TALK[3:]}, {"prompt": TALK[:1], "completion": TALK[1:2]}]
    prepared = words.prepare(tmp_path, rows, tokenizer, chat_template=THINKING)
    assert trained_text(tokenizer, prepared, 0) == "<think>\n\n</think>\nso 🙂 é\n好<|im_end|>\n"
    assert trained_text(tokenizer, prepared, 1) == "<think>\n\n</think>\nyo<|im_end|>\n"
    whole = tokenizer.apply_chat_template(TALK, chat_template=THINKING, tokenize=False)
    assert whole_text(tokenizer, prepared, 0) == whole


def test_a_generation_prompt_that_opens_thoughts_which_the_turn_lacks_is_seen_through(tmp_path):
    tokenizer = tiny.tokenizer()
    template = PLAIN.replace(
        "'<|im_start|>assistant\\n' -}}{%- endif", "'<|im_start|>assistant\\n<think>\\n' -}}{%- endif"
    )
    rows = [{"prompt": TALK[:3], "completion": TALK[3:]}]
    prepared = words.prepare(tmp_path, rows, tokenizer, chat_template=template)
    assert trained_text(tokenizer, prepared) == "so 🙂 é\n好<|im_end|>\n"


def test_completion_messages_are_trained_after_the_prompt_or_where_the_assistant_writes(tmp_path):
    tokenizer = tiny.tokenizer()
    rows = [{"prompt": TALK[:1], "completion": TALK[1:]}]
    for template in (tiny.TEMPLATE, PLAIN):
        after = words.prepare(tmp_path, rows, tokenizer, chat_template=template)
        assert trained_text(tokenizer, after).startswith("yo<|im_end|>\n<|im_start|>user\nand?")
        both = words.prepare(tmp_path, rows, tokenizer, chat_template=template, assistant_only_loss=True)
        assert trained_text(tokenizer, both) == "yo<|im_end|>so 🙂 é\n好<|im_end|>"
        whole = words.prepare(tmp_path, rows, tokenizer, chat_template=template, completion_only_loss=False)
        assert whole.samples(0)[0].trained.sum() == len(whole.samples(0)[0].tokens) - 1


def test_a_first_word_that_changes_after_a_special_token_is_trained_and_no_other(tmp_path):
    tokenizer = words.spaced_tokenizer()
    template = "{% for m in messages %}{{ '<a>' + m['role'][0] + m['content'] + '</s>' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ '<a>a' }}{% endif %}"
    rows = [
        {"messages": [words.user("ab c"), words.assistant("b y"), words.user("c"), words.assistant("c c")]}
    ]
    prepared = words.prepare(tmp_path, rows, tokenizer, chat_template=template, assistant_only_loss=True)
    (one,) = prepared.samples(0)
    pieces = tokenizer.convert_ids_to_tokens(one.tokens[one.trained])
    assert pieces == ["b", "▁y", "</s>", "c", "▁c", "</s>"]


def test_a_begin_token_of_template_and_tokenizer_stands_once(tmp_path):
    tokenizer = words.word_tokenizer("u a x y ?", bos=True)
    template = (
        "{{ '<s> ' }}{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] + ' E ' }}{% endfor %}"
    )
    template += "{% if add_generation_prompt %}{{ 'a ' }}{% endif %}"
    rows = [{"messages": [words.user("x"), words.assistant("y")]}]
    pairs = [{"prompt": rows[0]["messages"][:1], "completion": rows[0]["messages"][1:]}]
    for made in (rows, pairs):
        one = words.prepare(tmp_path, made, tokenizer, chat_template=template).samples(0)[0]
        assert one.tokens.tolist() == [0, 3, 5, 2, 4, 6, 2]
    doubled = template.replace("'<s> '", "'<s> <s> '")
    assert words.prepare(tmp_path, rows, tokenizer, chat_template=doubled).samples(0)[0].tokens.tolist()[
        :3
    ] == [0, 3, 5]


def test_a_template_that_cannot_be_proved_is_refused_with_the_row(tmp_path):
    tokenizer = tiny.tokenizer()
    backwards = "{% for m in messages | reverse %}{{ m['role'] + m['content'] }}{% endfor %}"
    with pytest.raises(mistake.Mistake, match=r"row 0 \(line 1 .*cannot prove.*generation"):
        words.prepare(
            tmp_path, [{"messages": TALK}], tokenizer, chat_template=backwards, assistant_only_loss=True
        )


def test_a_turn_that_is_opened_otherwise_than_the_generation_prompt_says_is_refused(tmp_path):
    other = THINKING.replace(
        "'<|im_start|>' + m['role'] + '\\n' -}}", "('user:' if m['role'] == 'user' else '') -}}"
    )
    other = other.replace(
        "'<think>\\n' + (m['reasoning_content'] or '') + '\\n</think>\\n' -}}", "'final:' -}}"
    )
    other = other.replace(
        "{{- m['content'] or '' -}}",
        "{{- ('said:' if m['role'] != 'user' and later else '') + m['content'] -}}",
    )
    other = other.replace("<|im_start|>assistant\\n", "said:")
    chat = chats.bind(tiny.tokenizer(), chat_template=other)
    assert chats.render(chat, TALK[:4]).startswith(
        "user:hi<|im_end|>\nsaid:yo<|im_end|>\nuser:and?<|im_end|>\nfinal:so"
    )
    with pytest.raises(mistake.Mistake, match="cannot prove where message 3 begins"):
        words.prepare(
            tmp_path, [{"messages": TALK}], tiny.tokenizer(), chat_template=other, assistant_only_loss=True
        )


def test_markers_inside_a_macro_are_found_where_they_print(tmp_path):
    tokenizer = tiny.tokenizer()
    template = """{% macro turn(m) %}{{ '<|im_start|>' + m['role'] + '\\n' }}
{%- if m['role'] == 'assistant' %}
    {% generation %}
{{ m['content'] + '<|im_end|>' }}
    {%- endgeneration %}
{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{% endmacro %}
{% for m in messages %}{{ turn(m) }}{% endfor %}"""
    prepared = words.prepare(
        tmp_path, [{"messages": TALK}], tokenizer, chat_template=template, assistant_only_loss=True
    )
    assert trained_text(tokenizer, prepared) == "yo<|im_end|>so 🙂 é\n好<|im_end|>"


def test_markers_around_text_that_the_template_edits_are_refused(tmp_path):
    template = tiny.TEMPLATE.replace(
        "{%- for message in messages -%}", "{%- set all -%}{%- for message in messages -%}", 1
    )
    template = template.replace(
        "{%- if add_generation_prompt -%}", "{%- endset -%}{{- all[2:] -}}{%- if add_generation_prompt -%}"
    )
    edited = template.replace("all[2:]", "all | replace('yo', 'no') | length")
    with pytest.raises(mistake.Mistake, match="edits the text between its generation markers"):
        words.prepare(
            tmp_path, [{"messages": TALK}], tiny.tokenizer(), chat_template=edited, assistant_only_loss=True
        )


def test_conversations_without_an_assistant_are_dropped_and_counted(tmp_path):
    rows = [{"messages": TALK}, {"messages": TALK[:1]}]
    prepared = words.prepare(tmp_path, rows, tiny.tokenizer(), assistant_only_loss=True)
    assert prepared.counts.dropped == {"nothing to train": 1}
    with pytest.raises(mistake.Mistake, match="leaves nothing to train"):
        words.prepare(tmp_path, rows[1:], tiny.tokenizer(), assistant_only_loss=True)


def test_human_and_gpt_train_like_user_and_assistant(tmp_path):
    tokenizer = tiny.tokenizer()
    names = {"user": "human", "assistant": "gpt"}
    told = [{"from": names[m["role"]], "value": m["content"]} for m in TALK]
    first = words.prepare(tmp_path, [{"messages": TALK}], tokenizer, assistant_only_loss=True)
    second = words.prepare(tmp_path, [{"conversations": told}], tokenizer, assistant_only_loss=True)
    assert words.targets(first.samples(0)[0]) == words.targets(second.samples(0)[0])
    calls = [*told[:1], {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'}]
    calls += [{"from": "observation", "value": "7"}, {"from": "gpt", "value": "7."}]
    third = words.prepare(tmp_path, [{"conversations": calls}], tokenizer, assistant_only_loss=True)
    assert trained_text(tokenizer, third) == (
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><|im_end|>7.<|im_end|>'
    )
    assert "<|im_start|>tool\n7" in whole_text(tokenizer, third)


@pytest.mark.parametrize(
    "messages",
    [
        [{"from": "robot", "value": "x"}],
        [{"role": "robot", "content": "x"}],
        [{"role": None, "content": "x"}],
    ],
)
def test_an_unknown_role_is_named(tmp_path, messages):
    with pytest.raises(mistake.Mistake, match=r"row 0 .*message 0: the role ('robot'|None) is unknown"):
        words.prepare(tmp_path, [{"messages": messages}], tiny.tokenizer())


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}])
def test_a_message_that_says_nothing_is_refused_unless_it_calls_a_tool(tmp_path, content):
    tokenizer = tiny.tokenizer()
    silent = {"role": "assistant", **content}
    good = {"messages": [words.user("x"), {**silent, "tool_calls": [words.call("f")]}]}
    joined = PLAIN.replace("m['content'] +", "m['content'] + (m['tool_calls'] or []) | tojson +")
    for template in (tiny.TEMPLATE, THINKING, joined):
        prepared = words.prepare(
            tmp_path, [good], tokenizer, chat_template=template, assistant_only_loss=True
        )
        assert "None" not in whole_text(tokenizer, prepared)
        assert '"f"' in trained_text(tokenizer, prepared)
    with pytest.raises(mistake.Mistake, match=r"row 1 \(line 2 .*content"):
        words.prepare(tmp_path, [good, {"messages": [words.user("x"), silent]}], tokenizer)


def test_a_user_without_content_is_refused_and_an_empty_answer_of_a_tool_is_not(tmp_path):
    tokenizer = tiny.tokenizer()
    with pytest.raises(mistake.Mistake, match="message 0: the content of role user is missing"):
        words.prepare(tmp_path, [{"messages": [{"role": "user"}, words.assistant("x")]}], tokenizer)
    rows = [
        {
            "messages": [
                words.user("x"),
                words.assistant("y"),
                {"role": "tool", "content": ""},
                words.assistant("z"),
            ]
        }
    ]
    assert trained_text(tokenizer, words.prepare(tmp_path, rows, tokenizer, assistant_only_loss=True)) == (
        "y<|im_end|>z<|im_end|>"
    )


def test_a_template_that_drops_tool_calls_is_refused(tmp_path):
    rows = [{"messages": [words.user("x"), words.assistant("y", tool_calls=[words.call("f")])]}]
    with pytest.raises(mistake.Mistake, match=r"row 0 .*does not print the tool_calls of message 1"):
        words.prepare(tmp_path, rows, tiny.tokenizer(), chat_template=PLAIN)


def test_tools_that_the_template_does_not_print_are_told(tmp_path):
    rows = [{"messages": TALK, "tools": [{"name": "f"}]}]
    unseen = words.prepare(tmp_path, rows, tiny.tokenizer(), chat_template=PLAIN)
    assert unseen.counts.tools_unseen == 1
    assert "does not print" in counts.notes(unseen.counts)[0]
    assert words.prepare(tmp_path, rows, tiny.tokenizer()).counts.tools_unseen == 0


def test_a_wrong_template_or_none_is_told(tmp_path):
    tokenizer = tiny.tokenizer()
    with pytest.raises(mistake.Mistake, match=r"there is no file missing\.jinja"):
        words.prepare(tmp_path, [{"messages": TALK}], tokenizer, chat_template="missing.jinja")
    (tmp_path / "own.jinja").write_text(PLAIN)
    from_file = words.prepare(
        tmp_path, [{"messages": TALK}], tokenizer, chat_template=str(tmp_path / "own.jinja")
    )
    assert whole_text(tokenizer, from_file).endswith("好<|im_end|>\n")
    tokenizer.chat_template = None
    with pytest.raises(mistake.Mistake, match="has no chat template"):
        words.prepare(tmp_path, [{"messages": TALK}], tokenizer)


def test_what_a_template_complains_about_is_told_with_the_row(tmp_path):
    template = "{{ raise_exception('roles must\\nalternate') }}"
    with pytest.raises(mistake.Mistake, match=r"row 0 \(line 1 .*roles must alternate"):
        words.prepare(tmp_path, [{"messages": TALK}], tiny.tokenizer(), chat_template=template)


def test_template_variables_reach_the_template_and_change_the_fingerprint(tmp_path):
    template = "{{ mood }}" + PLAIN
    made = [
        words.prepare(
            tmp_path,
            [{"messages": TALK}],
            tiny.tokenizer(),
            chat_template=template,
            chat_template_kwargs={"mood": mood},
        )
        for mood in ("calm", "loud")
    ]
    assert [whole_text(tiny.tokenizer(), one)[:4] for one in made] == ["calm", "loud"]
    assert made[0].fingerprint != made[1].fingerprint
