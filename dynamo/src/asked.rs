//! What a request of Dynamo's asks of the engine.

use crate::driver::first_line;
use candle_gdn_cli::settings::Settings;
use candle_gdn_models::{Request, Sampling, SplitMix64};
use dynamo_backend_common::{BackendError, DynamoError, ErrorType, PreprocessedRequest, SamplingOptions};
use std::collections::BTreeSet;

/// A request, and what the engine does not look after.
pub struct Asked {
    pub request: Request,
    pub ends: Ends,
}

/// Tokens that end a completion and that the engine does not know.
#[derive(Debug, Default, PartialEq)]
pub struct Ends {
    /// They are part of it.
    pub visible: BTreeSet<u32>,
    /// They are not, and so many tokens must come before.
    pub hidden: BTreeSet<u32>,
    pub min_tokens: usize,
}

/// What a token that came is.
#[derive(Debug, PartialEq)]
pub enum Kind {
    Inner,
    /// Of the completion, and its last.
    Last,
    /// Behind its end.
    Behind,
}

impl Ends {
    /// Of token number `n`, from 0.
    pub fn kind(&self, token: u32, n: usize) -> Kind {
        match () {
            _ if n < self.min_tokens => Kind::Inner,
            _ if self.visible.contains(&token) => Kind::Last,
            _ if self.hidden.contains(&token) => Kind::Behind,
            _ => Kind::Inner,
        }
    }
}

/// `settings` stand for what the request does not say, `number` counts the requests of this worker.
pub fn asked(
    request: &PreprocessedRequest,
    settings: &Settings,
    seed: u64,
    number: usize,
) -> Result<Asked, DynamoError> {
    refuse_what_is_not_there(request)?;
    let (options, stops) = (&request.sampling_options, &request.stop_conditions);
    let set = |ids: &Option<Vec<u32>>| ids.iter().flatten().copied().collect::<BTreeSet<u32>>();
    let visible = set(&stops.stop_token_ids_visible);
    let mut stop: BTreeSet<u32> =
        [&stops.stop_token_ids, &stops.stop_token_ids_hidden].into_iter().flat_map(set).collect();
    if stops.ignore_eos != Some(true) {
        stop.extend(&request.eos_token_ids);
        stop.extend(&settings.eos);
    }
    stop.retain(|id| !visible.contains(id));
    let min_tokens = stops.min_tokens.unwrap_or(0) as usize;
    let hidden = if min_tokens > 0 { std::mem::take(&mut stop) } else { BTreeSet::new() };
    let seed = options.seed.map_or(SplitMix64::seed(seed, number), |seed| seed as u64);
    let most = stops.max_tokens.map_or(usize::MAX, |n| n as usize);
    let sampling = sampling(options, &settings.sampling)?;
    let logprobs = request.output_options.logprobs.map(|count| count as usize);
    let request = Request { stop, sampling, seed, logprobs, ..Request::new(request.token_ids.to_vec(), most) };
    Ok(Asked { request, ends: Ends { visible, hidden, min_tokens } })
}

fn sampling(options: &SamplingOptions, default: &Sampling) -> Result<Sampling, DynamoError> {
    let sampling = Sampling {
        temperature: options.temperature.map_or(default.temperature, f64::from),
        top_k: match options.top_k {
            None => default.top_k,
            // Dynamo's way to say all.
            Some(-1) => 0,
            Some(k) => usize::try_from(k).map_err(|_| {
                invalid(format!("top_k: expected a whole number of at least 0, or -1 for all, got {k}"))
            })?,
        },
        top_p: options.top_p.map_or(default.top_p, f64::from),
        min_p: options.min_p.map_or(default.min_p, f64::from),
        repeat_penalty: options.repetition_penalty.unwrap_or(default.repeat_penalty),
        // Of a request the penalty is that of all tokens.
        repeat_last_n: if options.repetition_penalty.is_some() { usize::MAX } else { default.repeat_last_n },
        presence_penalty: options.presence_penalty.unwrap_or(default.presence_penalty),
        frequency_penalty: options.frequency_penalty.unwrap_or(default.frequency_penalty),
    };
    // Requests have another name for it.
    sampling.check().map_err(|e| invalid(first_line(&e).replace("repeat_penalty", "repetition_penalty")))?;
    Ok(sampling)
}

/// An answer that ignores what was asked would be a wrong one.
fn refuse_what_is_not_there(request: &PreprocessedRequest) -> Result<(), DynamoError> {
    let (options, stops, output) = (&request.sampling_options, &request.stop_conditions, &request.output_options);
    let asked = [
        ("n above 1", options.n.is_some_and(|n| n > 1)),
        ("best_of above 1", options.best_of.is_some_and(|n| n > 1)),
        ("use_beam_search", options.use_beam_search == Some(true)),
        ("guided decoding", options.guided_decoding.is_some()),
        ("prompt_logprobs", output.prompt_logprobs.is_some()),
        ("max_thinking_tokens", stops.max_thinking_tokens.is_some()),
        ("prompt_embeds", request.prompt_embeds.is_some()),
        ("images, videos and audio", request.multi_modal_data.as_ref().is_some_and(|data| !data.is_empty())),
    ];
    match asked.iter().find(|(_, asked)| *asked) {
        Some((what, _)) => Err(invalid(format!("{what}: this worker has none of it"))),
        None => Ok(()),
    }
}

/// The client is to be told.
pub fn invalid(message: String) -> DynamoError {
    let error = DynamoError::builder().error_type(ErrorType::Backend(BackendError::InvalidArgument));
    error.public_message(message.clone()).message(message).build()
}

#[cfg(test)]
mod tests {
    use super::*;
    use dynamo_backend_common::{OutputOptions, StopConditions};

    fn settings() -> Settings {
        Settings { eos: [7].into(), sampling: Sampling { temperature: 0.5, top_k: 20, ..Sampling::default() } }
    }

    fn of(stops: StopConditions, options: SamplingOptions) -> Result<Asked, DynamoError> {
        let request = PreprocessedRequest::builder()
            .model("m".into())
            .token_ids(vec![1, 2])
            .stop_conditions(stops)
            .sampling_options(options)
            .output_options(OutputOptions::default())
            .eos_token_ids(vec![8])
            .build();
        asked(&request.unwrap(), &settings(), 5, 3)
    }

    #[test]
    fn what_is_not_said_is_the_checkpoint_s() {
        let Asked { request, ends } = of(StopConditions::default(), SamplingOptions::default()).unwrap();
        assert_eq!(request.sampling, settings().sampling);
        assert_eq!(
            (request.stop, request.max_new_tokens, request.seed),
            ([7, 8].into(), usize::MAX, SplitMix64::seed(5, 3))
        );
        assert_eq!(ends, Ends::default());
    }

    #[test]
    fn options_go_to_the_engine() {
        let options = SamplingOptions {
            temperature: Some(0.),
            top_k: Some(-1),
            top_p: Some(0.25),
            min_p: Some(0.125),
            repetition_penalty: Some(1.5),
            presence_penalty: Some(0.5),
            frequency_penalty: Some(-0.25),
            seed: Some(11),
            ..SamplingOptions::default()
        };
        let stops = StopConditions {
            max_tokens: Some(9),
            ignore_eos: Some(true),
            stop_token_ids: Some(vec![3]),
            ..StopConditions::default()
        };
        let request = of(stops, options).unwrap().request;
        let want = Sampling {
            temperature: 0.,
            top_k: 0,
            top_p: 0.25,
            min_p: 0.125,
            repeat_penalty: 1.5,
            repeat_last_n: usize::MAX,
            presence_penalty: 0.5,
            frequency_penalty: -0.25,
        };
        assert_eq!(request.sampling, want);
        assert_eq!((request.seed, request.max_new_tokens, request.stop), (11, 9, [3].into()));
    }

    #[test]
    fn some_ends_are_not_the_engine_s() {
        let stops = StopConditions {
            min_tokens: Some(2),
            stop_token_ids_hidden: Some(vec![3, 4]),
            stop_token_ids_visible: Some(vec![4]),
            ..StopConditions::default()
        };
        let Asked { request, ends } = of(stops, SamplingOptions::default()).unwrap();
        assert_eq!(request.stop, [].into());
        assert_eq!((ends.kind(3, 1), ends.kind(4, 1)), (Kind::Inner, Kind::Inner), "too early");
        assert_eq!(
            (ends.kind(3, 2), ends.kind(7, 2), ends.kind(4, 2), ends.kind(5, 2)),
            (Kind::Behind, Kind::Behind, Kind::Last, Kind::Inner)
        );
    }

    #[test]
    fn what_is_not_there_is_refused() {
        let refused = |options| of(StopConditions::default(), options).err().unwrap().to_string();
        let default = SamplingOptions::default;
        for (options, word) in [
            (SamplingOptions { n: Some(2), ..default() }, "n above 1"),
            (SamplingOptions { min_p: Some(1.5), ..default() }, "min_p"),
            (SamplingOptions { top_k: Some(-2), ..default() }, "top_k"),
            (SamplingOptions { repetition_penalty: Some(0.), ..default() }, "repetition_penalty"),
            (SamplingOptions { temperature: Some(-1.), ..default() }, "temperature"),
            (SamplingOptions { top_p: Some(0.), ..default() }, "top_p"),
            (SamplingOptions { temperature: Some(f32::NAN), ..default() }, "temperature"),
            (SamplingOptions { presence_penalty: Some(f32::INFINITY), ..default() }, "presence_penalty"),
        ] {
            let error = refused(options);
            assert!(error.contains(word), "{error}");
        }
        assert!(of(StopConditions::default(), SamplingOptions { n: Some(1), min_p: Some(0.), ..default() }).is_ok());
    }
}
