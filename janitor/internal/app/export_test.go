package app

import corev1 "k8s.io/api/core/v1"

// Serve is Run against an API server that is given.
var Serve = run

// HandlePods is what tells of Pods.
var HandlePods = handle[*corev1.Pod]
