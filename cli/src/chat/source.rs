//! What minijinja does not read as jinja2 does, written so that it does.

/// The template with
/// - the line ends that jinja2 makes of all others,
/// - a scope in the place of the tag `generation`, which marks what is trained on,
/// - the filter `percent` in the place of the operator `%` behind a text in quotes.
pub fn source(template: &str) -> String {
    let text = template.replace("\r\n", "\n").replace('\r', "\n");
    let mut out = String::with_capacity(text.len());
    let mut rest = text.as_str();
    let is_tag = |text: &str| ["{{", "{%", "{#"].iter().any(|open| text.starts_with(open));
    while let Some((start, _)) = rest.match_indices('{').find(|(start, _)| is_tag(&rest[*start..])) {
        out.push_str(&rest[..start]);
        rest = &rest[start..];
        let length = match &rest[..2] {
            "{#" => rest.find("#}").map_or(rest.len(), |end| end + 2),
            open => 2 + expression(&rest[2..], if open == "{%" { "%}" } else { "}}" }),
        };
        let (tag, behind) = rest.split_at(length);
        rest = behind;
        match word(tag) {
            "generation" => out.push_str(&tag.replacen("generation", "with", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endwith", 1)),
            _ if tag.starts_with("{#") => out.push_str(tag),
            _ => percent(tag, &mut out),
        }
        if word(tag) == "raw" {
            let end = rest.match_indices("{%").find(|(start, _)| word(&rest[*start..]) == "endraw");
            let (raw, behind) = rest.split_at(end.map_or(rest.len(), |(start, _)| start));
            out.push_str(raw);
            rest = behind;
        }
    }
    out + rest
}

/// Whether the first tag that sets `name` reads it too, as in `set x = x if x is defined else 1`.
pub fn sets_from_itself(template: &str, name: &str) -> bool {
    let tags = template.match_indices("{%").map(|(start, _)| &template[start..]).filter(|tag| word(tag) == "set");
    let mut values = tags.filter_map(|tag| {
        let (targets, value) = tag[..2 + expression(&tag[2..], "%}")].split_once('=')?;
        names(targets).contains(&name).then_some(value)
    });
    values.next().is_some_and(|value| names(value).contains(&name))
}

/// The names in a tag, but for what is in quotes, behind a dot, or the name of an argument.
fn names(tag: &str) -> Vec<&str> {
    let (mut found, mut rest, mut is_attribute) = (Vec::new(), tag, false);
    while !rest.is_empty() {
        let (name, behind) = rest.split_at(rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len()));
        if name.is_empty() {
            is_attribute = rest.starts_with('.');
            rest = &rest[token(rest)..];
            continue;
        }
        let next = behind.trim_start();
        if !is_attribute && (!next.starts_with('=') || next.starts_with("==")) {
            found.push(name);
        }
        (rest, is_attribute) = (behind, false);
    }
    found
}

/// The first word of a tag with `{%`.
fn word(tag: &str) -> &str {
    let text = tag.strip_prefix("{%").unwrap_or_default().trim_start_matches(['-', '+']).trim_start();
    &text[..text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(text.len())]
}

/// The bytes up to behind `close`, which may stand in quotes and brackets too.
fn expression(text: &str, close: &str) -> usize {
    let (mut position, mut depth) = (0, 0usize);
    while position < text.len() && (depth > 0 || !text[position..].starts_with(close)) {
        match text.as_bytes()[position] {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        position += token(&text[position..]);
    }
    (position + close.len()).min(text.len())
}

/// The bytes of what `text` begins with: a text in quotes, or a character.
fn token(text: &str) -> usize {
    let mut chars = text.char_indices();
    let Some((_, first)) = chars.next() else { return 0 };
    if !matches!(first, '\'' | '"') {
        return first.len_utf8();
    }
    while let Some((position, c)) = chars.next() {
        match c {
            '\\' => drop(chars.next()),
            c if c == first => return position + 1,
            _ => {}
        }
    }
    text.len()
}

/// Copies a tag, with `"…" % x` as `"…"|percent(x)`.
fn percent(tag: &str, out: &mut String) {
    let (mut position, mut ends) = (2, Vec::new());
    out.push_str(&tag[..position]);
    while position < tag.len() {
        let rest = &tag[position..];
        let (part, behind) = rest.split_at(token(rest));
        out.push_str(part);
        position += part.len();
        if rest.starts_with(['\'', '"']) {
            let operand = behind.trim_start().strip_prefix('%').filter(|operand| !operand.starts_with('}'));
            if let Some(operand) = operand {
                out.push_str("|percent(");
                position = tag.len() - operand.len();
                ends.push(position + operand_length(operand));
            }
        }
        while ends.pop_if(|end| *end <= position).is_some() {
            out.push(')');
        }
    }
}

/// The bytes of a value with all that is called on it.
fn operand_length(text: &str) -> usize {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let mut rest = text.trim_start().trim_start_matches(['-', '+']);
    loop {
        rest = match rest.chars().next() {
            Some('\'' | '"') => &rest[token(rest)..],
            Some('(') => &rest[1 + expression(&rest[1..], ")")..],
            Some('[') => &rest[1 + expression(&rest[1..], "]")..],
            Some('{') => &rest[1 + expression(&rest[1..], "}")..],
            Some(c) if is_name(c) => rest.trim_start_matches(is_name),
            _ => match rest.trim_start().strip_prefix(['.', '|']) {
                Some(name) => name.trim_start(),
                None => return text.len() - rest.len(),
            },
        };
    }
}
