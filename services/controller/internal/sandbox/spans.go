package sandbox

import (
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// spanOf returns the attributes of spans of a sandbox.
func spanOf(t *target) trace.SpanStartOption {
	return trace.WithAttributes(attribute.String(obs.AttrSandboxNamespace, t.name.Namespace), attribute.String(obs.AttrSandboxName, t.name.Name),
		attribute.String(obs.AttrSandboxUID, t.sandbox.EffectiveUID()))
}

// spanOfFence returns the attributes of spans of a call on a container.
func spanOfFence(f identity.Fence) trace.SpanStartOption {
	return trace.WithAttributes(attribute.String(obs.AttrSandboxUID, f.SandboxUID), attribute.Int64(obs.AttrAttempt, f.Attempt),
		attribute.String(obs.AttrAgentUID, f.AgentUID))
}
