package app

import "k8s.io/apimachinery/pkg/runtime/schema"

// IgnoredResources returns the resources that are not watched.
func (c *Config) IgnoredResources() []schema.GroupResource { return c.ignored() }
