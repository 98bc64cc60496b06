//! Parse an algorithm's settings, named as in torch's optimizers.

use deepnvme_optim::{Adagrad, Adam, Algorithm, Lion, Sgd};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Return the algorithm of this name. Missing settings default to torch's.
pub(super) fn rule(name: &str, settings: &Bound<'_, PyDict>) -> PyResult<Algorithm> {
    let mut named = Named { settings, asked: Vec::new() };
    let rule = match name {
        "adam" => Algorithm::Adam(adam(&mut named, Adam::default())?),
        "adamw" => {
            let default = Adam { weight_decay: 1e-2, decoupled: true, ..Adam::default() };
            Algorithm::Adam(adam(&mut named, default)?)
        }
        "lion" => Algorithm::Lion(lion(&mut named)?),
        "sgd" => Algorithm::Sgd(sgd(&mut named)?),
        "adagrad" => Algorithm::Adagrad(adagrad(&mut named)?),
        _ => {
            return Err(PyValueError::new_err(format!(
                "rule is '{name}'; it must be 'adam', 'adamw', 'lion', 'sgd' or 'adagrad'"
            )));
        }
    };
    named.finish(name)?;
    Ok(rule)
}

fn adam(named: &mut Named<'_, '_>, default: Adam) -> PyResult<Adam> {
    Ok(Adam {
        lr: named.get("lr", default.lr)?,
        beta1: named.get("beta1", default.beta1)?,
        beta2: named.get("beta2", default.beta2)?,
        eps: named.get("eps", default.eps)?,
        weight_decay: named.get("weight_decay", default.weight_decay)?,
        decoupled: default.decoupled,
        amsgrad: named.get("amsgrad", default.amsgrad)?,
        maximize: named.get("maximize", default.maximize)?,
    })
}

fn lion(named: &mut Named<'_, '_>) -> PyResult<Lion> {
    let default = Lion::default();
    Ok(Lion {
        lr: named.get("lr", default.lr)?,
        beta1: named.get("beta1", default.beta1)?,
        beta2: named.get("beta2", default.beta2)?,
        weight_decay: named.get("weight_decay", default.weight_decay)?,
        maximize: named.get("maximize", default.maximize)?,
    })
}

fn sgd(named: &mut Named<'_, '_>) -> PyResult<Sgd> {
    let default = Sgd::default();
    Ok(Sgd {
        lr: named.get("lr", default.lr)?,
        momentum: named.get("momentum", default.momentum)?,
        dampening: named.get("dampening", default.dampening)?,
        nesterov: named.get("nesterov", default.nesterov)?,
        weight_decay: named.get("weight_decay", default.weight_decay)?,
        maximize: named.get("maximize", default.maximize)?,
    })
}

fn adagrad(named: &mut Named<'_, '_>) -> PyResult<Adagrad> {
    let default = Adagrad::default();
    Ok(Adagrad {
        lr: named.get("lr", default.lr)?,
        lr_decay: named.get("lr_decay", default.lr_decay)?,
        eps: named.get("eps", default.eps)?,
        weight_decay: named.get("weight_decay", default.weight_decay)?,
        maximize: named.get("maximize", default.maximize)?,
    })
}

/// Settings, with the names read so far.
struct Named<'a, 'py> {
    settings: &'a Bound<'py, PyDict>,
    asked: Vec<&'static str>,
}

impl<'py> Named<'_, 'py> {
    fn get<T: for<'a> FromPyObject<'a, 'py, Error = PyErr>>(&mut self, name: &'static str, default: T) -> PyResult<T> {
        self.asked.push(name);
        self.settings.get_item(name)?.map_or(Ok(default), |value| {
            value.extract().map_err(|error: PyErr| PyTypeError::new_err(format!("{name}: {error}")))
        })
    }

    fn finish(self, rule: &str) -> PyResult<()> {
        for name in self.settings.keys() {
            let name: String = name.extract()?;
            if !self.asked.contains(&name.as_str()) {
                let known = self.asked.join(", ");
                return Err(PyValueError::new_err(format!("{rule} has no setting '{name}'; use {known}")));
            }
        }
        Ok(())
    }
}
