use super::jinja::Jinja;
use super::{choose, source::source};
use minijinja::{context, Value};

/// Templates of our own and what jinja2 3.1.6 makes of them in the environment of transformers 5.
#[test]
fn templates_are_as_jinja2_reads_them() {
    let file: Value = serde_json::from_str(include_str!("cases.json")).unwrap();
    let cases = file.get_attr("cases").unwrap();
    assert!(cases.len().unwrap() > 10);
    for case in cases.try_iter().unwrap() {
        let [template, want] = [0, 1].map(|i| case.get_item_by_index(i).unwrap().to_string());
        let text = Jinja::new(&template).and_then(|jinja| jinja.render(file.get_attr("context").unwrap()));
        assert_eq!(text.map_err(|e| format!("{e:#}")), Ok(want), "{template}");
    }
}

#[test]
fn what_a_template_reads() {
    for (template, reads) in [
        ("{{ thinking }}", true),
        ("{% if not thinking %}{% set thinking = true %}{% endif %}", true),
        ("{% for m in messages %}{% set thinking = thinking | default(true) %}{{ thinking }}{% endfor %}", true),
        ("{%- set thinking = true if thinking is not defined else thinking -%}", true),
        ("{% set ns = namespace(thinking=thinking) %}", true),
        ("{{ message.thinking }}{{ message['thinking'] }}{{ ns(thinking=1) }}{# thinking #}", false),
        ("{% for thinking in messages %}{{ thinking.content }}{% endfor %}", false),
        ("{% set thinking = message.thinking %}{{ thinking }}{% set thinking = thinking ~ '.' %}", false),
        ("{% set thinking = 'thinking' ~ f(thinking=1) %}{{ thinking == 1 }}", false),
    ] {
        assert_eq!(Jinja::new(template).unwrap().reads("thinking").unwrap(), reads, "{template}");
    }
    assert!(!Jinja::new("{% if x is defined %}{% else %}{% endif %}").unwrap().reads("defined").unwrap());
}

#[test]
fn a_template_makes_no_text_without_bound() {
    let doubled = |expression: &str| {
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ".to_string()
            + expression
            + " %}{% endfor %}{{ ns.x | length }}"
    };
    let endless =
        ["ns.x ~ ns.x", "ns.x.replace('a', 'aaaa')", "'%s%s' % (ns.x, ns.x)", "ns.x|tojson", "[ns.x, ns.x]|join"];
    let wide = ["'%1000000000d' % 1", "'{:>1000000000}'.format(1)", "'a'.ljust(1000000000)", "'a' * 1000000000"];
    let wide = wide.map(|expression| format!("{{{{ {expression} }}}}"));
    for template in endless.map(doubled).into_iter().chain(wide) {
        let error = Jinja::new(&template).unwrap().render(context! {}).expect_err(&template);
        assert!(format!("{error:#}").contains("fuel"), "{template}: {error:#}");
    }
}

#[test]
fn a_long_template_is_read_or_refused() {
    let long = |count: usize| Jinja::new(&format!("{{{{ 1{} }}}}", "+1".repeat(count)));
    assert_eq!(long(30_000).unwrap().render(context! {}).unwrap(), "30001");
    let Err(error) = long(35_000) else { panic!("expected a refusal") };
    assert!(format!("{error:#}").contains("expected at most 65536 bytes, got 70007"), "{error:#}");
    for operator in ["()", ".a", "|int"] {
        let template = format!("{{{{ x{} }}}}", operator.repeat(65_000 / operator.len()));
        assert!(Jinja::new(&template).unwrap().reads("x").unwrap(), "{operator}");
    }
}

#[test]
fn what_a_template_raises_is_told() {
    let error = Jinja::new("{{ raise_exception('no such role') }}").unwrap().render(context! {}).unwrap_err();
    assert!(format!("{error:#}").contains("no such role"));
}

#[test]
fn the_template_of_transformers_is_chosen() {
    let named = |names: &[&str]| names.iter().map(|name| (name.to_string(), format!("{name}'s"))).collect();
    let chosen = |names: &[&str], tools| choose(named(names), tools).unwrap();
    assert_eq!(chosen(&[], false), None);
    assert_eq!(chosen(&["default", "rag", "tool_use"], false).unwrap(), "default's");
    assert_eq!(chosen(&["default", "tool_use"], true).unwrap(), "tool_use's");
    assert_eq!(chosen(&["default"], true).unwrap(), "default's");
    let error = choose(named(&["a", "b"]), false).unwrap_err().to_string();
    assert!(error.contains("default") && error.contains("a, b"), "{error}");
}

#[test]
fn an_odd_template_is_left_as_it_is() {
    for text in ["{%", "{{", "{#", "{{ 'a", "{% raw %}{{", "{{ '\\", "{{ ((([ }}", "{% %}", "{{ 'a' % }}", "é{"] {
        assert_eq!(source(text).chars().next(), text.chars().next(), "{text}");
    }
}

/// As lists do that are added to each other again and again, in a process of its own, which it ends.
#[cfg(target_os = "linux")]
#[test]
fn what_takes_memory_without_bound_ends_the_program() {
    const CHILD: &str = "CANDLE_GDN_TEST_TAKES_MEMORY";
    if std::env::var_os(CHILD).is_some() {
        super::watch::bounded(|| std::hint::black_box((0..2048).map(|_| vec![1u8; 1 << 20]).collect::<Vec<_>>()));
        panic!("2 GiB were taken");
    }
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    let name = "chat::tests::what_takes_memory_without_bound_ends_the_program";
    let out = child.args([name, "--exact", "--nocapture"]).env(CHILD, "1").output().unwrap();
    let text = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{text}");
    assert!(text.contains("error: the chat template: expected lists of at most 384 MiB"), "{text}");
}
