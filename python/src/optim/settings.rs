//! Parse an algorithm's settings, named as in torch's optimizers.

use deepnvme_optim::{Adagrad, Adam, Algorithm, Lion, Sgd};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Return the algorithm of this name. Missing settings default to torch's.
pub(super) fn algorithm(name: &str, settings: &Bound<'_, PyDict>) -> PyResult<Algorithm> {
    let mut reader = SettingsReader { settings, names_read: Vec::new() };
    let algorithm = match name {
        "adam" => Algorithm::Adam(adam(&mut reader, Adam::default())?),
        "adamw" => {
            let default = Adam { weight_decay: 1e-2, decoupled: true, ..Adam::default() };
            Algorithm::Adam(adam(&mut reader, default)?)
        }
        "lion" => Algorithm::Lion(lion(&mut reader)?),
        "sgd" => Algorithm::Sgd(sgd(&mut reader)?),
        "adagrad" => Algorithm::Adagrad(adagrad(&mut reader)?),
        _ => {
            return Err(PyValueError::new_err(format!(
                "algorithm is '{name}'; it must be 'adam', 'adamw', 'lion', 'sgd' or 'adagrad'"
            )));
        }
    };
    reader.finish(name)?;
    Ok(algorithm)
}

fn adam(reader: &mut SettingsReader<'_, '_>, default: Adam) -> PyResult<Adam> {
    Ok(Adam {
        lr: reader.get("lr", default.lr)?,
        beta1: reader.get("beta1", default.beta1)?,
        beta2: reader.get("beta2", default.beta2)?,
        eps: reader.get("eps", default.eps)?,
        weight_decay: reader.get("weight_decay", default.weight_decay)?,
        decoupled: default.decoupled,
        amsgrad: reader.get("amsgrad", default.amsgrad)?,
        maximize: reader.get("maximize", default.maximize)?,
    })
}

fn lion(reader: &mut SettingsReader<'_, '_>) -> PyResult<Lion> {
    let default = Lion::default();
    Ok(Lion {
        lr: reader.get("lr", default.lr)?,
        beta1: reader.get("beta1", default.beta1)?,
        beta2: reader.get("beta2", default.beta2)?,
        weight_decay: reader.get("weight_decay", default.weight_decay)?,
        maximize: reader.get("maximize", default.maximize)?,
    })
}

fn sgd(reader: &mut SettingsReader<'_, '_>) -> PyResult<Sgd> {
    let default = Sgd::default();
    Ok(Sgd {
        lr: reader.get("lr", default.lr)?,
        momentum: reader.get("momentum", default.momentum)?,
        dampening: reader.get("dampening", default.dampening)?,
        nesterov: reader.get("nesterov", default.nesterov)?,
        weight_decay: reader.get("weight_decay", default.weight_decay)?,
        maximize: reader.get("maximize", default.maximize)?,
    })
}

fn adagrad(reader: &mut SettingsReader<'_, '_>) -> PyResult<Adagrad> {
    let default = Adagrad::default();
    Ok(Adagrad {
        lr: reader.get("lr", default.lr)?,
        lr_decay: reader.get("lr_decay", default.lr_decay)?,
        eps: reader.get("eps", default.eps)?,
        weight_decay: reader.get("weight_decay", default.weight_decay)?,
        maximize: reader.get("maximize", default.maximize)?,
    })
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
                return Err(PyValueError::new_err(format!("{algorithm} has no setting '{name}'; use {known}")));
            }
        }
        Ok(())
    }
}
