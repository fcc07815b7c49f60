"""Chat templates that take too much memory or time, or write too much, or write something other than text."""

MEMORY_BOMBS = {
    "times": "{{ ('a' * 100000) * 100000 }}",
    "times of a long text": "{{ messages[0].content * 1000000000 }}",
    "ljust": "{{ 'x'.ljust(10 ** 9) | length }}",
    "center": "{{ 'x'.center(10 ** 9) | length }}",
    "center, the filter": "{{ 'x' | center(1000000000) | length }}",
    "percent": "{{ ('%1000000000d' % 1) | length }}",
    "tilde": "{% set text = namespace(s='aaaaaaaaaa') %}"
    "{% for i in range(27) %}{% set text.s = text.s ~ text.s %}{% endfor %}{{ text.s | length }}",
    "tojson": "{{ messages | tojson(indent=1000000000) | length }}",
}
TIME_BOMBS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over texts": "{% for a in 'x' * 99999 %}{% for b in 'x' * 99999 %}{% endfor %}{% endfor %}",
    # The interpreter runs no other thread until it has computed the number.
    "power": "{{ (messages | length + 8) ** 999999999 % 7 }}",
    "lipsum": "{{ lipsum(n=10000000) | length }}",
}
TEXT_BOMBS = {
    "100 MB in pieces": "{% for i in range(100) %}{{ 'x' * 1000000 }}{% endfor %}",
    "100 MB at once": "{{ messages[0].content * 20000000 }}",
    "to be shielded": "{% for i in range(100) %}{{ ('x' * 1000000) | tojson | length }}{% endfor %}",
}
SURROGATE = "{{ messages[0].content }}{{ '\\ud800' }}"
