//! Parse an algorithm's settings, named as in torch's optimizers, except `beta1` and `beta2` for `betas`.

use deepnvme_optim::{Adagrad, Adam, Algorithm, Lion, Sgd};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::InvalidArgumentError;

/// Read the named settings, and return the defaults with them.
macro_rules! read {
    ($reader:expr, $default:expr, [$($name:ident),*]) => {{
        let mut algorithm = $default;
        $(algorithm.$name = $reader.get(stringify!($name), algorithm.$name)?;)*
        algorithm
    }};
}

/// Returns the algorithm of this name. Missing settings have torch's defaults (for Lion, which torch lacks, those of
/// `Lion`).
pub(super) fn algorithm(name: &str, settings: &Bound<'_, PyDict>) -> PyResult<Algorithm> {
    let mut reader = SettingsReader { settings, names_read: Vec::new() };
    let algorithm = match name {
        "adam" => Algorithm::Adam(adam(&mut reader, Adam::default())?),
        "adamw" => {
            let default = Adam { weight_decay: 1e-2, decoupled: true, ..Adam::default() };
            Algorithm::Adam(adam(&mut reader, default)?)
        }
        "lion" => Algorithm::Lion(read!(reader, Lion::default(), [lr, beta1, beta2, weight_decay, maximize])),
        "sgd" => {
            Algorithm::Sgd(read!(reader, Sgd::default(), [lr, momentum, dampening, nesterov, weight_decay, maximize]))
        }
        "adagrad" => Algorithm::Adagrad(read!(reader, Adagrad::default(), [lr, lr_decay, eps, weight_decay, maximize])),
        _ => {
            return Err(InvalidArgumentError::new_err(format!(
                "algorithm is '{name}'; it must be 'adam', 'adamw', 'lion', 'sgd' or 'adagrad'"
            )));
        }
    };
    reader.finish(name)?;
    Ok(algorithm)
}

fn adam(reader: &mut SettingsReader<'_, '_>, default: Adam) -> PyResult<Adam> {
    Ok(read!(reader, default, [lr, beta1, beta2, eps, weight_decay, amsgrad, maximize]))
}

/// Settings, with the names read so far.
struct SettingsReader<'a, 'py> {
    settings: &'a Bound<'py, PyDict>,
    names_read: Vec<&'static str>,
}

impl<'py> SettingsReader<'_, 'py> {
    fn get<T: for<'a> FromPyObject<'a, 'py, Error = PyErr>>(&mut self, name: &'static str, default: T) -> PyResult<T> {
        self.names_read.push(name);
        self.settings.get_item(name)?.map_or(Ok(default), |value| {
            value.extract().map_err(|error: PyErr| PyTypeError::new_err(format!("{name}: {error}")))
        })
    }

    fn finish(self, algorithm: &str) -> PyResult<()> {
        for name in self.settings.keys() {
            let name: String = name.extract()?;
            if !self.names_read.contains(&name.as_str()) {
                let known = self.names_read.join(", ");
                return Err(InvalidArgumentError::new_err(format!("{algorithm} has no setting '{name}'; use {known}")));
            }
        }
        Ok(())
    }
}
