package app

import corev1 "k8s.io/api/core/v1"

// Serve is Run with a given API server.
var Serve = run

// TrimLogs bounds logs until ctx ends.
var TrimLogs = trimLogs

// HandlePods exports handle for Pods.
var HandlePods = handle[*corev1.Pod]

// CollectShims removes unused versions of the shim until ctx ends.
var CollectShims = collectShims
