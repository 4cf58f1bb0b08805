"""Checks a model: rules over facts, collected in a report."""

from normwise.checkup.check import check as check
from normwise.checkup.check import map as map
from normwise.checkup.configuration import Configuration as Configuration
from normwise.checkup.finding import Basis as Basis
from normwise.checkup.finding import Finding as Finding
from normwise.checkup.finding import NotChecked as NotChecked
from normwise.checkup.finding import Severity as Severity
from normwise.checkup.finding import Suppressed as Suppressed
from normwise.checkup.finding import Unused as Unused
from normwise.checkup.report import Report as Report
from normwise.checkup.suppression import ignore as ignore
