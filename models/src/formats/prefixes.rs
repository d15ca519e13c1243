//! Where the parts of a text model stand in a checkpoint: alone, inside a multimodal model, inside what a trainer wrapped around it.

/// What trainers put before names; two may follow each other.
const WRAPPERS: &[&str] = &["", "module.", "_orig_mod.", "base_model.model."];
/// The text model, as transformers, vLLM and MLX, and savers of a bare model have it.
const TEXTS: &[&str] = &["model.", "model.language_model.", "language_model.model.", "language_model.", ""];

/// A name without all that may stand before `layers`, `lm_head` and their like.
pub(crate) fn inside(mut name: &str) -> &str {
    let outer = || WRAPPERS[1..].iter().chain(&["model.", "language_model."]);
    while let Some(rest) = outer().find_map(|outer| name.strip_prefix(outer)) {
        name = rest;
    }
    name
}

/// Prefixes without the dot at the end; empty at the root.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Prefixes {
    /// Of `embed_tokens`, `layers` and `norm`.
    pub text: String,
    /// Of `lm_head`.
    pub head: String,
    /// Of `mtp`.
    pub draft_head: String,
}

impl Prefixes {
    /// Those of a checkpoint that `has` tensors; the usual ones where it has no embeddings, so that an error names these.
    pub(crate) fn find(has: impl Fn(&str) -> bool) -> Self {
        let pairs = WRAPPERS.iter().flat_map(|a| WRAPPERS.iter().map(move |b| format!("{a}{b}")));
        let all = pairs.flat_map(|outer| TEXTS.iter().map(move |text| (outer.clone(), text)));
        let inside =
            all.flat_map(|(outer, text)| WRAPPERS[..3].iter().map(move |w| (outer.clone(), format!("{text}{w}"))));
        let found = inside.into_iter().find(|(outer, text)| has(&format!("{outer}{text}embed_tokens.weight")));
        let (outer, text) = found.unwrap_or_else(|| (String::new(), TEXTS[0].into()));
        let bare = |prefix: String| prefix.trim_end_matches('.').to_string();
        let place = |weight: &str| {
            let places = ["", "language_model.", "model."].map(|inner| format!("{outer}{inner}"));
            bare(places.iter().find(|place| has(&format!("{place}{weight}"))).unwrap_or(&places[0]).clone())
        };
        Self { head: place("lm_head.weight"), draft_head: place("mtp.fc.weight"), text: bare(format!("{outer}{text}")) }
    }

    /// Whether a name is one of a model of so many layers: embeddings, layers, last norm, head.
    pub(crate) fn is_own(&self, name: &str, layers: usize) -> bool {
        let below = |prefix: &str| match prefix {
            "" => Some(name),
            prefix => name.strip_prefix(prefix)?.strip_prefix('.'),
        };
        let of_text = |name: &str| match name.split_once('.') {
            Some(("layers", rest)) => {
                let number = rest.split_once('.').and_then(|(number, _)| number.parse::<usize>().ok());
                number.is_some_and(|number| number < layers)
            }
            Some((part, _)) => matches!(part, "embed_tokens" | "norm"),
            None => false,
        };
        below(&self.text).is_some_and(of_text) || below(&self.head).is_some_and(|name| name.starts_with("lm_head."))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_stays_before_a_layer() {
        for outer in ["", "model.", "base_model.model.model.language_model.", "language_model.model._orig_mod."] {
            assert_eq!(inside(&format!("{outer}layers.0.mlp")), "layers.0.mlp");
        }
        assert_eq!(inside("model.visual.blocks.0"), "visual.blocks.0");
    }

    #[test]
    fn what_is_around_a_model_is_found() {
        for (text, head) in [
            ("model", ""),
            ("model.language_model", ""),
            ("language_model.model", "language_model"),
            ("base_model.model.model", "base_model.model"),
            ("base_model.model.model.language_model", "base_model.model"),
            ("module._orig_mod.model", "module._orig_mod"),
            ("_orig_mod.language_model.model", "_orig_mod.language_model"),
            ("model._orig_mod", ""),
            ("language_model", ""),
            ("", ""),
        ] {
            let at =
                |prefix: &str, name: &str| if prefix.is_empty() { name.into() } else { format!("{prefix}.{name}") };
            let names = [at(text, "embed_tokens.weight"), at(head, "lm_head.weight"), at(head, "mtp.fc.weight")];
            let found = Prefixes::find(|name| names.iter().any(|n| n == name));
            assert_eq!(found, Prefixes { text: text.into(), head: head.into(), draft_head: head.into() });
        }
        assert_eq!(Prefixes::find(|_| false).text, "model");
    }
}
