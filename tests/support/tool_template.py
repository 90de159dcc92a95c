"""Chat templates that write tool calls."""

# The heart of Qwen2.5's own template.
QWEN_TOOLS = r"""
{%- if tools %}{{- '<|im_start|>system\n# Tools' }}{%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
{{- "<|im_end|>\n" }}{%- endif %}
{%- for message in messages %}
    {%- if message.role != "tool" and not message.tool_calls %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {%- if THINKS and message.role == "assistant" and loop.last %}{{- '<think></think>' }}{%- endif %}
        {{- message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\n<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {%- if messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

# The heart of Mistral's: the tools stand before the last question, wherever that is.
MISTRAL_TOOLS = r"""
{%- set asked = messages | selectattr("role", "equalto", "user") | list %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {%- if tools and message == asked[-1] %}{{- "[TOOLS]" + (tools | tojson) + "[/TOOLS]" }}{%- endif %}
        {{- "[INST]" + message.content + "[/INST]" }}
    {%- elif message.tool_calls %}
        {{- "[CALLS][" }}
        {%- for call in message.tool_calls %}{{- call.function | tojson }}{%- endfor %}{{- "]<|im_end|>" }}
    {%- elif message.role == "assistant" %}{{- message.content + "<|im_end|>" }}
    {%- else %}{{- '[RESULT]{"content": ' + message.content + "}[/RESULT]" }}{%- endif %}
{%- endfor %}
"""
