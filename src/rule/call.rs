//! What decode and prefill share: the one check of a call's arguments, and the plan of its launch.

use super::options::{Gates, RuleOptions};
use crate::algo::Algo;
use crate::plan::refuses_rule;
use crate::reference::Dims;
use candle_core::{bail, DType, Layout, Result, Shape, Tensor};
use candle_gdn_core::check::*;
use candle_gdn_core::{CuSeqlens, SequencePlan, Slots};

/// The gated delta rule with everything but q, k and v.
#[derive(Debug, Clone)]
pub(crate) struct Rule {
    pub name: &'static str,
    pub gates: RuleGates,
    pub state: Tensor,
    /// Sequences begin at zero, and the state is only written.
    pub from_zeros: bool,
    pub slots: Option<Slots>,
    pub cu_seqlens: Option<CuSeqlens>,
    pub options: RuleOptions,
}

/// The gates of a call.
#[derive(Debug, Clone)]
pub(crate) struct RuleGates {
    /// The decay input, or the log decay where there is no `raw`.
    pub a: Tensor,
    /// The beta input, or beta.
    pub b: Tensor,
    /// `a_log` and `dt_bias`.
    pub raw: Option<[Tensor; 2]>,
}

impl From<Gates> for RuleGates {
    fn from(Gates { a, b, a_log, dt_bias }: Gates) -> Self {
        Self { a, b, raw: Some([a_log, dt_bias]) }
    }
}

impl RuleGates {
    /// What the caller calls the first two.
    fn names(&self) -> [&'static str; 2] {
        match self.raw {
            Some(_) => ["a", "b"],
            None => ["log_decay", "beta"],
        }
    }

    /// All tensors by name.
    pub fn tensors(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        let raw = self.raw.iter().flat_map(|[a_log, dt_bias]| [("a_log", a_log), ("dt_bias", dt_bias)]);
        self.names().into_iter().zip([&self.a, &self.b]).chain(raw)
    }
}

/// A checked call: sizes and addresses, nothing left to refuse.
#[derive(Debug, Clone)]
pub(crate) struct RulePlan {
    pub sizes: Dims,
    pub seqs: SequencePlan,
    pub q: HeadsLayout,
    pub k: HeadsLayout,
    pub v: HeadsLayout,
    pub a: HeadsLayout,
    pub b: HeadsLayout,
    pub out_shape: Shape,
    pub scale: f64,
}

impl Rule {
    /// A call on `state` with sequence `n` in slot `n`, unchecked.
    pub fn new(name: &'static str, gates: RuleGates, state: &Tensor, options: RuleOptions) -> Self {
        Self { name, gates, state: state.clone(), from_zeros: false, slots: None, cu_seqlens: None, options }
    }

    /// Checks that need only what the op holds.
    pub fn checked(self) -> Result<Self> {
        let (op, device) = (self.name, self.state.device());
        check_state_dtype(op, "state", self.state.dtype())?;
        let (_, heads, ..) = match self.state.dims4() {
            Ok(dims) => dims,
            Err(_) => bail!(
                "{op}: state: expected shape [slots, value_heads, value_dim, key_dim], got {:?}",
                self.state.dims()
            ),
        };
        check_state_strides(op, "state", self.state.layout())?;
        for (arg, tensor) in self.gates.tensors().chain([("state", &self.state)]) {
            check_untracked(op, arg, tensor)?;
        }
        let (RuleGates { a, b, raw }, names) = (&self.gates, self.gates.names());
        check_float(op, names[0], a.dtype())?;
        check_dtype(op, names[1], b.dtype(), a.dtype())?;
        for (arg, tensor) in self.gates.tensors() {
            Arg::tensor(arg, tensor).check_place(op, device, &[("the state", &self.state)])?;
        }
        for (arg, tensor) in ["a_log", "dt_bias"].into_iter().zip(raw.iter().flatten()) {
            check_dtype(op, arg, tensor.dtype(), DType::F32)?;
            check_shape(op, arg, tensor, &[heads])?;
            check_contiguous(op, arg, tensor)?;
        }
        self.options.check(op)?;
        if let Some(cu) = &self.cu_seqlens {
            check_device(op, "cu_seqlens", cu.tensor(), device)?;
        }
        Ok(self)
    }

    /// Checks a call: the three arguments against each other and against what the op holds.
    pub fn plan(&self, lead: Lead, args: [Arg<'_>; 3]) -> Result<RulePlan> {
        let op = self.name;
        for arg in args {
            check_float(op, arg.name, arg.dtype)?;
            check_dtype(op, arg.name, arg.dtype, args[0].dtype)?;
            arg.check_place(op, self.state.device(), &[("the state", &self.state)])?;
        }
        self.plan_layouts(lead, args[0].dtype, args.map(|arg| arg.layout))
    }

    /// The same of layouts of tensors that were checked, of one dtype.
    pub fn plan_layouts(&self, lead: Lead, dtype: DType, [q, k, v]: [&Layout; 3]) -> Result<RulePlan> {
        let op = self.name;
        let (_, value_heads, value_dim, key_dim) = self.state.dims4()?;
        if !(1..=256).contains(&key_dim) || !(1..=256).contains(&value_dim) || value_heads == 0 {
            bail!(
                "{op}: state: expected at least one head and head sizes of 1 to 256, got shape {:?}",
                self.state.dims()
            );
        }
        let r = lead.rank();
        self.check_mistakes(lead, (q.dims(), v.dims()), (value_heads, value_dim, key_dim))?;
        let key_heads = match q.dims().get(r..) {
            Some([heads, dim]) if *dim == key_dim => *heads,
            Some([merged]) if merged % key_dim == 0 => merged / key_dim,
            _ => bail!(
                "{op}: q: expected shape [{lead}, key_heads, {key_dim}] or [{lead}, key_heads * {key_dim}], got {:?}",
                q.dims(),
                lead = lead.names()
            ),
        };
        if key_heads == 0 || value_heads % key_heads != 0 {
            bail!(
                "{op}: q: expected a number of key heads that divides the {value_heads} value heads, got {key_heads}"
            );
        }
        let lead_dims = &q.dims()[..r];
        let heads = |arg, layout, sizes| heads_layout(op, arg, layout, lead, lead_dims, sizes);
        let gate = |arg, tensor: &Tensor| gate_layout(op, arg, tensor.layout(), lead, lead_dims, value_heads);

        let names = self.gates.names();
        let (cu_seqlens, slots) = (self.cu_seqlens.as_ref(), self.slots.as_ref());
        let seqs = SequencePlan::new((op, "q"), (lead, lead_dims), cu_seqlens, slots, &self.state)?;
        self.check_algo(dtype, (key_dim, value_dim), seqs.max_tokens)?;
        Ok(RulePlan {
            sizes: Dims { key_heads, value_heads, key_dim, value_dim },
            seqs,
            q: heads("q", q, (key_heads, key_dim))?,
            k: heads("k", k, (key_heads, key_dim))?,
            v: heads("v", v, (value_heads, value_dim))?,
            a: gate(names[0], &self.gates.a)?,
            b: gate(names[1], &self.gates.b)?,
            out_shape: lead_dims.iter().copied().chain([value_heads, value_dim]).collect::<Vec<_>>().into(),
            scale: self.options.scale.unwrap_or((key_dim as f64).powf(-0.5)),
        })
    }

    /// Two mistakes for which the checks of q and v would blame these: a state with K before V, and packed tokens without
    /// boundaries.
    fn check_mistakes(&self, lead: Lead, (q, v): (&[usize], &[usize]), sizes: (usize, usize, usize)) -> Result<()> {
        let (heads, value_dim, key_dim) = sizes;
        let fits = |rank: usize, value_dim: usize, key_dim: usize| {
            let (q, v) = (q.get(rank..).unwrap_or_default(), v.get(rank..).unwrap_or_default());
            let keys = matches!(*q, [_, dim] if dim == key_dim) || matches!(*q, [merged] if merged % key_dim == 0);
            keys && (v == [heads, value_dim] || v == [heads * value_dim])
        };
        if fits(lead.rank(), value_dim, key_dim) {
            return Ok(());
        }
        let (op, state) = (self.name, self.state.dims());
        if fits(lead.rank(), key_dim, value_dim) {
            let want = [state[0], heads, key_dim, value_dim];
            bail!("{op}: state: expected shape {want:?}, value_dim before key_dim as v and q have them, got {state:?}");
        }
        if lead == Lead::Batched && q.len() == v.len() && fits(Lead::Packed.rank(), value_dim, key_dim) {
            bail!("{op}: cu_seqlens: expected the boundaries of packed tokens (q is {q:?}, without a batch), got none");
        }
        Ok(())
    }

    /// The chosen kernel against the sizes and the dtype of q.
    fn check_algo(&self, dtype: DType, sizes: (usize, usize), longest: usize) -> Result<()> {
        let (op, algo) = (self.name, self.options.algo);
        if let Some(why) = refuses_rule(algo, dtype, sizes, longest, self.cu_seqlens.is_some()) {
            bail!("{op}: algo: {algo:?} {why}");
        }
        let plain = self.gates.raw.is_some() && !self.from_zeros;
        if !plain && !matches!(algo.of_rule(), Algo::Auto | Algo::Recurrent | Algo::ChunkedSm80 | Algo::ChunkedSm90) {
            bail!(
                "{op}: algo: {algo:?} supports raw gates and an initial state; Auto, Recurrent and the chunk forms support any"
            );
        }
        Ok(())
    }
}
