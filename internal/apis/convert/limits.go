package convert

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// resourcePids is the name of the limit on processes, for which Kubernetes has no resource name.
const resourcePids corev1.ResourceName = "pids"

// LimitsToProto converts limits. It returns nil if there are none.
func LimitsToProto(r *v1alpha1.SandboxResources) *sandboxv1.ResourceLimits {
	if r == nil || len(r.Limits) == 0 {
		return nil
	}
	pids := r.Limits[resourcePids]
	return &sandboxv1.ResourceLimits{
		CpuMillis: r.Limits.Cpu().MilliValue(), MemoryBytes: r.Limits.Memory().Value(), Pids: pids.Value(),
	}
}

// LimitsFromProto converts limits. It returns nil if there are none.
func LimitsFromProto(l *sandboxv1.ResourceLimits) *v1alpha1.SandboxResources {
	out := corev1.ResourceList{}
	if l.GetCpuMillis() > 0 {
		out[corev1.ResourceCPU] = *resource.NewMilliQuantity(l.GetCpuMillis(), resource.DecimalSI)
	}
	if l.GetMemoryBytes() > 0 {
		out[corev1.ResourceMemory] = *resource.NewQuantity(l.GetMemoryBytes(), resource.BinarySI)
	}
	if l.GetPids() > 0 {
		out[resourcePids] = *resource.NewQuantity(l.GetPids(), resource.DecimalSI)
	}
	if len(out) == 0 {
		return nil
	}
	return &v1alpha1.SandboxResources{Limits: out}
}

// Effective returns the limits of spec, with each limit that spec does not set taken from defaults. Both may be nil.
func Effective(spec, defaults *sandboxv1.ResourceLimits) *sandboxv1.ResourceLimits {
	pick := func(a, b int64) int64 {
		if a > 0 {
			return a
		}
		return b
	}
	return &sandboxv1.ResourceLimits{
		CpuMillis:   pick(spec.GetCpuMillis(), defaults.GetCpuMillis()),
		MemoryBytes: pick(spec.GetMemoryBytes(), defaults.GetMemoryBytes()),
		Pids:        pick(spec.GetPids(), defaults.GetPids()),
	}
}
