//! Weights that are variables, as those of a `VarMap`, are read once.

use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};

/// `vb` with copies instead of variables: no optimiser changes a part of the model, and no gradient is asked for.
pub(crate) fn read_once(vb: VarBuilder<'_>) -> VarBuilder<'_> {
    let (dtype, device) = (vb.dtype(), vb.device().clone());
    VarBuilder::from_backend(Box::new(ReadOnce(vb)), dtype, device)
}

struct ReadOnce<'a>(VarBuilder<'a>);

fn copied(weight: Tensor) -> Result<Tensor> {
    if weight.track_op() {
        return weight.detach().force_contiguous();
    }
    Ok(weight)
}

impl SimpleBackend for ReadOnce<'_> {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        copied(self.0.clone().set_device(device.clone()).get_with_hints_dtype(shape, name, init, dtype)?)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        copied(self.0.clone().set_device(device.clone()).get_unchecked_dtype(name, dtype)?)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.contains_tensor(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_nn::VarMap;

    #[test]
    fn a_variable_is_copied() {
        let map = VarMap::new();
        let vb = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
        vb.pp("a").get_with_hints(2, "w", Init::Const(1.0)).unwrap();
        let weights = read_once(vb.pp("a"));
        let weight = weights.get(2, "w").unwrap();
        map.all_vars()[0].set(&Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap()).unwrap();
        assert!(!weight.track_op() && weight.to_vec1::<f32>().unwrap() == [1.0; 2]);
        assert!(weights.contains_tensor("w") && !weights.contains_tensor("v"));
    }
}
